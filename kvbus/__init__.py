"""Move KV-cache pages between LLM inference instances, with ownership that can be proved."""
