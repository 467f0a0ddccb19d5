"""Read launch scripts without running a shell: `syntax` parses, `interpreter` follows the commands."""
