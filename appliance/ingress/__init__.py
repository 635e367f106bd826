"""The ingress: the single entry to a cluster from outside, and the home of its coordinators."""
