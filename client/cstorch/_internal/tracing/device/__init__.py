"""The device type `lazy` as torch sees it: what happens to each ATen call that concerns it."""
