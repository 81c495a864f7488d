"""Any error to a response, in the form of the API that was asked."""

import logging

from starlette.responses import JSONResponse, Response

from cog_triton.api.openai.call import current
from cog_triton.api.openai.errors import HANDLED, MESSAGES_PATH, ApiError, Asked, api_error

logger = logging.getLogger(__name__)


def client_error(error: Exception, route: str = "") -> ApiError:
    """Return an error as the client reads it; note it for the request's line of the log.

    Args:
        route: the method and path of the request, for the errors that name them.
    """
    call = current()
    if not isinstance(error, HANDLED):
        logger.error("an answer failed", exc_info=error)
    refusal = api_error(error, Asked(call.names, route))
    call.reason = refusal.log_text()
    return refusal


def error_response(error: ApiError) -> Response:
    """Return an error in the form of the API whose route is asked."""
    call = current()
    path = MESSAGES_PATH if call.anthropic else call.path
    return JSONResponse(error.body(path, call.id), error.status, error.headers)
