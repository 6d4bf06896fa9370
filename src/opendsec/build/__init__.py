"""Build images from Dockerfiles and templates, in sandboxes of the platform. No Docker anywhere.

The client's side only: it starts sandboxes, puts files in, packs them. See docs/howto/build.md.
"""

from __future__ import annotations

from opendsec.build.building import build
from opendsec.build.events import BuildEvent, BuildNote, BuiltImage, StepBegun, StepDone, StepOutput
from opendsec.build.plan import BuildOptions
from opendsec.build.taking import Limits
from opendsec.build.template import Template

__all__ = [
    "BuildEvent",
    "BuildNote",
    "BuildOptions",
    "BuiltImage",
    "Limits",
    "StepBegun",
    "StepDone",
    "StepOutput",
    "Template",
    "build",
]
