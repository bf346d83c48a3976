"""vLLM's plugin: the load format `mx`. Entry point of the group `vllm.general_plugins`.

    vllm serve MODEL --load-format mx --model-loader-extra-config '{"uri": "s3://…", "serve": true}'

vLLM calls `register` in each of its processes, also those of engines that never ask for the format.
"""

from __future__ import annotations

FORMAT = "mx"


def register() -> None:
    """Make the load format known. Idempotent; an engine with another format is not changed.

    A vLLM without the parts that the loader is made of says so in its log, and goes on without the format.
    """
    try:
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as known
        from vllm.model_executor.model_loader import register_model_loader

        from mx_cli.engines.vllm_loader import MxLoader
    except ImportError as error:
        import logging

        logging.getLogger(__name__).warning("load format %s is not available in this vLLM: %s", FORMAT, error)
        return
    if FORMAT not in known:
        register_model_loader(FORMAT)(MxLoader)
