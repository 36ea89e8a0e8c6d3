"""Run SGLang over the groups of this project: `SGLANG_PLUGINS=group_coordinator sglang serve …`.

SGLang calls the entry point `register` in each of its processes, before it creates groups. It puts
`SglangGroupCoordinator` in the place of SGLang's class, in the modules that use it. Nothing of SGLang is changed on
disk. If SGLang lacks something that this needs, or its class has a method that ours lacks, `register` logs what it
looked for and changes nothing.

`parallel_state` has SGLang's functions over our groups for programs that use them without SGLang.
"""

from coordinator.settings import names_sglang_plugin

__all__ = ["install", "register"]


def register() -> None:
    """Put our group in the place of SGLang's, if `SGLANG_PLUGINS` names `group_coordinator`. Idempotent."""
    if names_sglang_plugin("group_coordinator"):
        install()


def install() -> None:
    """Put our group in the place of SGLang's, or log a warning that says why not. Idempotent.

    A program that starts SGLang's parts by itself calls this before SGLang creates its groups.
    """
    from coordinator.integrations.sglang.plugin import install as replace

    replace()
