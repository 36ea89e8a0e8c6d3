"""Adapters that let inference engines use this project unmodified. The project's other packages never import them."""
