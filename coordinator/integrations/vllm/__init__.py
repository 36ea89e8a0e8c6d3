"""Run vLLM over the groups and queues of this project: `VLLM_PLUGINS=group_coordinator vllm serve …`.

vLLM calls the entry point `register` before it creates groups and queues, except in processes that it forks. It puts
`VllmGroupCoordinator` and `MessageQueue` in the place of vLLM's classes, in the modules that use them. Nothing of vLLM
is changed on disk. If vLLM lacks something that this needs, or its classes have a method or an attribute that ours
lack, `register` logs what it looked for and changes nothing.
"""

from coordinator.settings import names_vllm_plugin

__all__ = ["register"]


def register() -> None:
    """Put this project's classes in the place of vLLM's, if `VLLM_PLUGINS` names `group_coordinator`. Idempotent."""
    if names_vllm_plugin("group_coordinator"):
        from coordinator.integrations.vllm.plugin import install

        install()
