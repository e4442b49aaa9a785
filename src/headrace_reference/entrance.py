"""What this package registers with Headrace: the reference's options, recipes and scripts, translated to ours."""

from collections.abc import Mapping
from pathlib import Path

from headrace.config.field import Origin
from headrace.config.layers import Given, Layer
from headrace.config.translations import Translation
from headrace.core.local_path import local_text
from headrace_reference.applications import application_help
from headrace_reference.scripts import script_words
from headrace_reference.tables import Reference
from headrace_reference.translate import REFERENCE_YIELDS, has_defaults, reword, translate

CACHE_VARIABLE = "TF_POPLAR_FLAGS"  # where the reference says in which directory compiled programs are kept


def _environment(environ: Mapping[str, str]) -> Layer:
    found = {}
    for flag in environ.get(CACHE_VARIABLE, "").split():
        name, _, value = flag.partition("=")
        if name.lstrip("-") == "executable_cache_path" and value:
            origin = Origin(kind="environment", where=f"${CACHE_VARIABLE}")
            found["compilation_cache_dir"] = Given(value=local_text(value, origin.where), origin=origin)
    return found


REFERENCE = Translation(
    sections={"reference": Reference},
    yields=REFERENCE_YIELDS,
    recipes=(Path(__file__).parent / "recipes",),
    environment=_environment,
    has_defaults=has_defaults,
    chooses=lambda source: "application" not in source,  # they have defaults of their own
    reword=reword,
    translate=translate,
    help=application_help,
    script_words=script_words,
)
