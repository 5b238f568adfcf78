"""Layer 10, the audit: attacks run (`running.py`), what came of them kept (`results.py`) and shown to people."""
