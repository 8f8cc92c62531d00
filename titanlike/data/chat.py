"""Conversations as text, by the tokenizer's own Jinja template, with what the assistant says marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer


class ChatTemplate:
    """The chat template of a tokenizer.

    What is learnt of an answer is the text that rendering it adds to the conversation so far with the generation
    prompt: its content and whatever the template puts after it, such as the token that ends a turn.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UserError: the tokenizer has no template, or it is not Jinja.
        """
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

        if tokenizer.chat_template is None:
            raise UserError(
                'format = "chat" needs a tokenizer with a chat template: a data.tokenizer folder whose '
                "tokenizer_config.json has chat_template, or that has chat_template.jinja"
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        # Not strftime_now, which some templates ask for if there is one: what is learnt would depend on the day.
        environment.globals.update({"raise_exception": _refuse})  # pyrefly: ignore
        try:
            self._template = environment.from_string(tokenizer.chat_template)
        except jinja2.TemplateError as error:
            raise UserError(f"the tokenizer's chat template is not Jinja: {error}") from None
        self._special_tokens = tokenizer.special_tokens

    def parts(self, messages: Any, where: Callable[[], str]) -> list[tuple[str, bool]]:
        """The conversation's text in parts, and whether each is learnt.

        Raises:
            UserError: the messages are not a list of tables with role and content, or the template refuses them.
        """
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise UserError(f"{where()} is not a list of messages with role and content")
        parts: list[tuple[str, bool]] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:i], True, where)
                after = self._render(messages[: i + 1], False, where)
                if not (before.startswith(done) and after.startswith(before)):
                    raise UserError(
                        f"{where()}: the chat template changes what came before when it adds message {i + 1}, so what "
                        "the assistant says can't be told apart"
                    )
                parts += [(before[len(done) :], False), (after[len(before) :], True)]
                done = after
        if messages and messages[-1]["role"] != "assistant":
            parts.append((self._render(messages, False, where).removeprefix(done), False))
        return [part for part in parts if part[0]]

    def _render(self, messages: list[Any], add_generation_prompt: bool, where: Callable[[], str]) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, AttributeError) as error:
            raise UserError(f"{where()}: the chat template refuses it: {error}") from None


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)
