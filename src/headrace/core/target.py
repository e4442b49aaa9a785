"""What a program is made for: the devices of this process, or others that are not here."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of device, as far as programs and plans for it differ from those for another."""

    platform: str  # cpu | gpu | tpu, as JAX says
    capability: str = ""  # an NVIDIA GPU's, such as 9.0
    portable: bool = False  # lowered for any platform, each operation in the form that suits it
    name: str = ""  # of devices that are not here, as their driver writes it
    kind: str = ""  # and as the option names them: h200, v5e
    memory_bytes: int | None = None  # of one of them
    count: int = 1  # of all machines
    machines: int = 1  # each is a process of the run
    slices: int = 1  # of TPUs, which a network joins

    @property
    def lowering(self) -> str:
        """JAX's name of the platform that programs are lowered for."""
        if self.platform != "gpu":
            return self.platform
        return "rocm" if self.capability.startswith("gfx") else "cuda"
