"""Plug-ins of frameworks, each imported by those who use it: `aiockpt.integrations.ray` and so on."""
