"""click's own sentences that a user of brim can meet, listed so that the catalogue of translations holds them too.

Nothing imports this file: the extraction of sentences reads it, and a test compares it with the click that is installed.
"""

from __future__ import annotations

from brim.locale import N_

MESSAGES = (
    N_("Options"),
    N_("Usage:"),
    N_("Show this message and exit."),
    N_("Got unexpected extra argument ({args})"),
    N_("Got unexpected extra arguments ({args})"),
    N_("Invalid value: {message}"),
    N_("Invalid value for {param_hint}: {message}"),
    N_("Missing argument"),
    N_("Missing option"),
    N_("Missing parameter"),
    N_("No such option {name!r}."),
    N_("Did you mean {possibility}?"),
    N_("(Did you mean one of: {possibilities}?)"),
    N_("Option {name!r} requires an argument."),
    N_("Option {name!r} requires {nargs} arguments."),
    N_("Option {name!r} does not take a value."),
    N_("{value!r} is not {choice}."),
    N_("{value!r} is not one of {choices}."),
    N_("{value!r} is not a valid {number_type}."),
    N_("{value!r} is not a valid boolean. Recognized values: {states}"),
    N_("default: {default}"),
)
