"""The manifests and the Helm chart of a cluster on Kubernetes, made from the roles in docker-compose.yml."""
