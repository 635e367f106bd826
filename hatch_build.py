"""The part of the package's metadata that depends on where it is built: the addresses of its repository.

The repository has none of its own, so a package has those of the repository whose workflow builds it, a fork's too.
"""

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryMetadata(MetadataHookInterface):
    """The hook that hatchling calls, with the project's metadata, when it builds a package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the addresses, by variables of the workflow; nothing where there is no workflow."""
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        if server and repository:
            source = f"{server}/{repository}"
            changes = f"{source}/blob/main/CHANGELOG.md"
            metadata["urls"] = {"Source": source, "Issues": f"{source}/issues", "Changelog": changes}
