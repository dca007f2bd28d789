"""kvpool inside vLLM: a KV connector. ``docs/vllm.md`` says how to switch it on.

Only ``connector`` and ``engine`` import vLLM; the rest is plain code that is tested without it.
"""
