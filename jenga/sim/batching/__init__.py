"""Steps as vLLM's scheduler makes them, the bytes they need and the seconds they take."""
