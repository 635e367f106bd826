"""Names of attributes in a checkpoint, as the real system calls them."""

from cstorch._internal.checkpoint_files import layout

__SPEC__ = layout.SPEC
__TYPE__ = layout.TYPE
__OBJECTS__ = layout.OBJECTS
__VERSION__ = layout.VERSION
__CSTORCH_VERSION__ = layout.WRITER_VERSION

CURRENT_CKPT_FORMAT_VERSION = layout.FORMAT_VERSION
