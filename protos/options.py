"""Options that several commands share, each declared once as the field of a dataclass."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from protos.access import Access
from protos.serving import ServingConfig
from protos.transport import ClientTls, ServerTls


def _option(text: str, variable: str, panel: str) -> Any:
    return typer.Option(
        help=text, envvar=f"MOE_LENS_{variable}", rich_help_panel=panel, show_default=False
    )


def _serving(text: str, variable: str) -> Any:
    return _option(text, variable, "Security of this service")


def _peer(text: str, variable: str) -> Any:
    return _option(text, variable, "Security towards the services that this one calls")


@dataclass(frozen=True)
class ServingSecurity:
    """How a service protects itself. Without TLS and tokens anyone who reaches it may call it."""

    tls_certificate: Annotated[
        Path | None, _serving("PEM of this server's certificate.", "TLS_CERTIFICATE")
    ] = None
    tls_key: Annotated[Path | None, _serving("PEM of its key.", "TLS_KEY")] = None
    tls_client_ca: Annotated[
        Path | None,
        _serving("PEM of an authority: clients must show its certificate.", "TLS_CLIENT_CA"),
    ] = None
    token_file: Annotated[
        Path | None,
        _serving("File of bearer tokens, `name token` a line: callers need one.", "TOKENS"),
    ] = None
    max_calls_per_token: Annotated[
        int | None, _serving("Calls that one token may have under way.", "MAX_CALLS_PER_TOKEN")
    ] = None
    max_message_bytes: Annotated[
        int, _serving("Largest message in either direction.", "MAX_MESSAGE_BYTES")
    ] = 16 * 2**20

    def config(
        self, process: str, listen: str, grace_s: float, local_listen: str | None = None
    ) -> ServingConfig:
        """Raises ValueError for settings that do not go together, OSError for unreadable files."""
        tls = None
        if self.tls_certificate is not None and self.tls_key is not None:
            tls = ServerTls(self.tls_certificate, self.tls_key, self.tls_client_ca)
        elif self.tls_certificate or self.tls_key or self.tls_client_ca:
            raise ValueError("tls_certificate and tls_key have to be given together")
        if self.max_calls_per_token is not None and self.token_file is None:
            raise ValueError("max_calls_per_token needs token_file")
        access = Access(self.token_file, self.max_calls_per_token) if self.token_file else None
        return ServingConfig(
            process,
            listen,
            tls=tls,
            access=access,
            local_listen=local_listen,
            grace_s=grace_s,
            max_message_bytes=self.max_message_bytes,
        )

    @classmethod
    def variables(cls) -> frozenset[str]:
        """The environment variables that these options read."""
        hints = get_type_hints(cls, include_extras=True)
        return frozenset(hint.__metadata__[0].envvar for hint in hints.values())

    def flags(self) -> tuple[str, ...]:
        """The same settings as command-line flags, for a process that this one starts."""
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple(
            f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None
        )


@dataclass(frozen=True)
class PeerSecurity:
    """What a service shows to, and asks of, the services that it calls over TCP."""

    peer_ca: Annotated[
        Path | None, _peer("PEM of the authority that their certificates must have.", "PEER_CA")
    ] = None
    peer_certificate: Annotated[
        Path | None, _peer("PEM of the certificate to show them.", "PEER_CERTIFICATE")
    ] = None
    peer_key: Annotated[Path | None, _peer("PEM of its key.", "PEER_KEY")] = None

    def tls(self) -> ClientTls | None:
        """None: no TLS."""
        if self.peer_ca is None and self.peer_certificate is None:
            return None
        return ClientTls(self.peer_ca, self.peer_certificate, self.peer_key)


def with_options(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn `command(first, second, …, own…)` into a function with an option for each field of the
    dataclasses named, which it gets as its first arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[len(groups) :]
        own_hints = get_type_hints(command, include_extras=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in own]
        annotations = {parameter.name: own_hints[parameter.name] for parameter in own}
        for group in groups:
            hints = get_type_hints(group, include_extras=True)
            for field in fields(group):
                annotations[field.name] = hints[field.name]
                parameters.append(
                    inspect.Parameter(
                        field.name, keyword, default=field.default, annotation=hints[field.name]
                    )
                )

        @wraps(command)
        def flat(**values: Any) -> None:
            made = [
                group(**{field.name: values.pop(field.name) for field in fields(group)})
                for group in groups
            ]
            command(*made, **values)

        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = annotations
        del flat.__dict__["__wrapped__"]  # or the original signature would be looked at
        return flat

    return decorate
