"""All-reduces with other work in the same call, and the references that define their bits."""
