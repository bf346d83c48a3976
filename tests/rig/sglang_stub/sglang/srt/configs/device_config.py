from __future__ import annotations


class DeviceConfig:
    def __init__(self, device: str = "cuda", gpu_id: int = -1) -> None:
        self.device = device
        self.gpu_id = gpu_id
