"""The manifests of a cluster on Kubernetes, made of what docker-compose.yml says of its roles."""
