"""ComfyUI's entry point to the pack. Outside of ComfyUI use `sparge_core`."""

from .nodes.extension import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
