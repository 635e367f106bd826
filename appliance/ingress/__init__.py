"""The ingress: the one way in from outside, and where coordinators run."""
