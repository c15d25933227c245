"""Lets SGLang and verl run on hosts without a GPU: `cpu_host` for engines, `cpu_host.verl_settings` for verl."""
