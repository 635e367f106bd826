"""The device type `lazy` in torch: its registration, and the dispatch of its calls."""
