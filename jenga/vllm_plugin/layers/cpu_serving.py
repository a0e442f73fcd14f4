"""Attention and states on a CPU: PyTorch references, or kernels in Triton's interpreter."""

import torch
from vllm.logger import init_logger

from jenga.vllm_plugin.settings.environment import BACKEND_NAME
from jenga_kernels.triton.lib.device import skip_overflow_checks
from jenga_kernels.triton.lib.tiles import has_kernels

logger = init_logger(f"vllm.{__name__}")


def prepare_device(device: torch.device) -> None:
    """Prepare an engine's layers for their device, and log how a CPU serves them.

    Args:
        device: Device of the layers' caches.
    """
    if device.type != "cpu":
        return
    if has_kernels(device):
        skip_overflow_checks()
        logger.info_once(
            "%s: Triton's interpreter runs the kernels of attention and states on this CPU; "
            "PyTorch references, which serve without TRITON_INTERPRET=1, are faster",
            BACKEND_NAME,
        )
    else:
        logger.info_once(
            "%s: PyTorch references compute attention and states on this CPU; with "
            "TRITON_INTERPRET=1, Triton's interpreter runs the kernels",
            BACKEND_NAME,
        )
