"""Adapters that put engines on this project without a change to the engine. Nothing here is imported by the rest."""
