"""docs/config.md, which scripts/config_docs.py writes."""

import pytest

from facetrain.config.explain import section_of
from facetrain.config.schema import Config
from scripts.config_docs import PAGE, page


def test_the_reference_of_the_config_is_that_of_the_settings():
    assert PAGE.read_text() == page(), "run `make config-docs`"


def settings_of(settings):
    yield settings
    for field in settings.model_fields.values():
        if inner := section_of(field):
            yield from settings_of(inner)


@pytest.mark.parametrize("settings", [pytest.param(each, id=each.__name__) for each in settings_of(Config)])
def test_every_key_has_a_description(settings):
    names = [
        name for name, field in settings.model_fields.items() if not (field.description or section_of(field))
    ]
    assert settings.__doc__ and not names
