"""ComfyUI's nodes: one file each, thin. What is known of ComfyUI itself is in host.py."""
