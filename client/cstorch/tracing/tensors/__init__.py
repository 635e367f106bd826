"""What a script holds for a tensor on the device, and where its bytes are."""
