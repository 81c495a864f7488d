"""What must not be shown or passed on: credentials in URLs, in environment variables, in command lines.

A signed URL has its signature in the query, other URLs have a password before the host or a token in the
fragment. Whatever is printed, logged, measured or traced shows a URL by ``shown_url`` only.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

HIDDEN = "***"

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
# How archives are called, and what may stand behind their names in a path.
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", re.IGNORECASE)

# TensorRT-LLM's processes need this key between them, TRITON_SECRETS has names only, and a path of a file
# with a secret is no secret.
_PUBLIC_NAME = re.compile(
    r"TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY|TRITON_SECRETS|(?!AWS_).*_(PATH|FILE|DIR|DIRECTORY)",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"""
    AWS_                                # all that belongs to an account there
    | TOKEN(?!IZER|S|_MS)               # HF_TOKEN, GITHUBTOKEN, TOKEN_VALUE; not MAX_TOKENS, TOKEN_MS
    | (API|AUTH|ACCESS|REFRESH|BEARER|SECRET)_?TOKENS
    | SECRET
    | (?<!BY)PASS(?!ES|IVE|THROUGH)     # PASSWORD, PGPASS, SSH_PASSPHRASE
    | (_|DB)PWD$                        # DB_PWD; PWD and OLDPWD are directories
    | CREDENTIAL | SIGNATURE | COOKIE | CONNECTION_?STRING
    | (^|_)AUTH(ORIZATION)?$ | ^AUTHORIZATION$
    | KEYS?$ | KEY_ID$                  # OPENAI_API_KEY, OPENAI_API_KEYS, APIKEY
    | _HEADERS$                         # OTEL_EXPORTER_OTLP_HEADERS and its like: authorization=…
    | _SAS$ | _PAT$
    """,
    re.IGNORECASE | re.VERBOSE,
)
_PASSWORD_IN_URL = re.compile(r"//[^/\s@]*:[^/\s]+@")
# Addresses are also written without a scheme: user:password@proxy:3128, user:password@tcp(db:3306)/name.
_ADDRESS_NAME = re.compile(r"_(URL|URI|DSN|PROXY)$", re.IGNORECASE)
_PASSWORD_IN_ADDRESS = re.compile(r"^[^/@\s]*:[^/@\s]+@")
_SECRET_PARAMETER = re.compile(
    r"(^|[?&;#\s_-])(sig|signature|token|access_token|password|passwd|pwd|secret|key|api_?key|"
    r"accountkey|sharedaccesssignature|x-[a-z]+-(signature|credential|security-token))=[^&;\s]",
    re.IGNORECASE,
)
_JSON_TEXT = re.compile(r'(?P<name>"(?P<key>[\w-]+)"\s*:\s*")(\\.|[^"\\])*"')
# Models are fetched before tritonserver starts, and the URLs of many are signed in ways not listed above.
_MODEL_NAMES = frozenset({"COG_WEIGHTS", "MODEL", "TOKENIZER"})


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: user, password, parameters, query and fragment."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return re.split(r"[?#]", url, maxsplit=1)[0]
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    if "@" in path and ":" in host and not host.rpartition(":")[2].isdecimal():
        # A password with a slash in it, which should have been written %2F.
        host, slash, path = (host + slash + path).rpartition("@")[2].partition("/")
    path = path.split(";", 1)[0]
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def name_of_url(url: str) -> str:
    """Return the name of what a URL names: its last part without an archive's suffix, else its host."""
    # Not urlsplit, which raises for some: whether a URL is well-formed is checked when it is fetched.
    scheme, _, rest = shown_url(url).partition("://")
    host, _, path = rest.partition("/")
    name = PurePosixPath(unquote(path)).name.partition("?")[0]
    return without_archive_suffix(name) or host.partition(":")[0] or scheme


def without_archive_suffix(name: str) -> str:
    """Return a file's name without .tar, .tar.gz, .tgz and the like."""
    return _ARCHIVE.sub("", name)


def keep_urls_out_of_logs() -> None:
    """Silence the libraries that log whole URLs, redirects to signed ones included, and headers."""
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def without_secrets(text: str) -> str:
    """Return a text whose URLs are shown as ``shown_url`` has them."""
    return _URL.sub(lambda match: shown_url(match[0]), text)


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable or an option holds a secret, by its name or its value."""
    if _is_secret_name(name):
        return True
    if name.upper() in _MODEL_NAMES and "://" in value:
        return True
    if _PASSWORD_IN_URL.search(value):
        return True
    if _ADDRESS_NAME.search(name):
        return bool(_PASSWORD_IN_ADDRESS.search(value) or _SECRET_PARAMETER.search(value))
    return "://" in value and _SECRET_PARAMETER.search(value) is not None


def shown_value(name: str, value: str) -> str:
    """Return a variable's value as a report or an error has it."""
    if name.upper() in _MODEL_NAMES or not is_secret(name, value):
        return without_secrets(value)
    return HIDDEN


def shown_words(words: Sequence[str]) -> list[str]:
    """Return a command line's words with its secrets hidden.

    Secrets are values of options (``--api-key KEY``, ``--api-key=KEY``), of variables (``NAME=VALUE``), of
    headers (``Authorization: Bearer KEY``), and what URLs have besides host and path.
    """
    shown = []
    # The option before, whose value may be the next word.
    option = ""
    for word in words:
        if word.startswith("-"):
            name, separator, value = word.partition("=")
            option = "" if separator else name
            shown.append(f"{name}={_shown_argument(name, value)}" if separator else word)
        else:
            shown.append(_shown_argument(option, word))
            option = ""
    return shown


def _shown_argument(option: str, value: str) -> str:
    if _is_secret_name(option.lstrip("-")):
        return HIDDEN
    assignment = re.fullmatch(r"(\w[\w-]*)=(.*)", value, re.DOTALL)
    if assignment:
        return f"{assignment[1]}={shown_value(assignment[1], assignment[2])}"
    header = re.fullmatch(r"([\w-]+):\s*(.+)", value, re.DOTALL)
    if header and _is_secret_name(header[1]):
        return f"{header[1]}: {HIDDEN}"
    return without_secrets(_JSON_TEXT.sub(_shown_member, value))


def _shown_member(member: re.Match[str]) -> str:
    return f'{member["name"]}{HIDDEN}"' if _is_secret_name(member["key"]) else member[0]


def _is_secret_name(name: str) -> bool:
    variable = name.replace("-", "_")
    return bool(_SECRET_NAME.search(variable)) and not _PUBLIC_NAME.fullmatch(variable)
