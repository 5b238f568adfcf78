"""Attacks on what a coalition sees, a module for each; `cgd.audit.registry` lists them."""
