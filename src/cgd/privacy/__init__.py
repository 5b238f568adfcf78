"""Layer 7, what leaks: what a coalition sees (`view.py`), under which scheme (`schemes.py`), and attacks on it."""
