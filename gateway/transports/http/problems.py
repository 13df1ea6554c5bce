"""Problem details (RFC 9457): the answer to what never became a call."""

import json

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway.errors import NotFound, Problem, TooLarge, Unavailable, Unprocessable
from gateway.text import printable
from sandboxes import CommandRefused, FileRefused, NotOffered, SandboxError

TITLES = {400: "Bad request", 404: "Not found", 405: "Method not allowed", 416: "Range not satisfiable"}


def problem_response(problem: Problem) -> Response:
    """Build the answer; texts are escaped, for names in them may be hostile."""
    headers = {"cache-control": "no-store", **problem.headers}
    if problem.retry_after_seconds is not None:
        headers["retry-after"] = str(problem.retry_after_seconds)
    return _response(
        problem.status, problem.title, printable(problem.message), problem.code, printable(problem.remedy), headers
    )


def _response(status: int, title: str, detail: str, code: str, remedy: str, headers: dict[str, str]) -> Response:
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail, "code": code, "remedy": remedy}
    return Response(json.dumps(body), status, headers, "application/problem+json")


def install_problem_handlers(app: FastAPI) -> None:
    """Make every refusal of the application a problem, also the framework's own."""

    async def answer(_: Request, error: Exception) -> Response:
        return answer_to(error)

    for kind in (Problem, SandboxError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def answer_to(error: Exception) -> Response:
    """The answer to whatever a route raised."""
    match error:
        case Problem():
            return problem_response(error)
        case SandboxError():
            return problem_response(file_problem(error))
        case RequestValidationError():
            return problem_response(invalid_body(error))
        case HTTPException(__cause__=Problem() as cause):  # FastAPI makes a 400 of what is raised while it reads a body
            return problem_response(cause)
        case HTTPException(__cause__=RecursionError() | ValueError()):
            return problem_response(unreadable_body())
        case HTTPException():
            title = TITLES.get(error.status_code, "Refused")
            code = title.lower().replace(" ", "_")
            return _response(error.status_code, title, title, code, "", dict(error.headers or {}))
        case ClientDisconnect():
            return Response(status_code=400)  # nobody is there to read it
    return problem_response(Problem("the gateway failed", "Its log has the reason."))


def invalid_body(error: RequestValidationError | ValidationError) -> Unprocessable:
    """The first thing that is wrong with a request, by the place where it is."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return Unprocessable(f"{where or 'body'}: {first['msg']}"[:1000], "See /openapi.json.")


def unreadable_body() -> Unprocessable:
    """What is no JSON, or too deep."""
    return Unprocessable("body: not JSON that can be read here", "Send JSON, as UTF-8, not nested too deep.")


def file_problem(error: SandboxError) -> Problem:
    """What a refused file operation or terminal is over HTTP."""
    match error:
        case FileRefused(code="missing_file"):
            return NotFound("no such file", error.remedy, code="missing_file")
        case FileRefused(code="content_too_large"):
            return TooLarge(error.message, error.remedy, code="content_too_large")
        case FileRefused():
            return Unprocessable(error.message, error.remedy, code=error.code)
        case NotOffered():
            return Unprocessable(error.message, error.remedy, code="unsupported_tool")
        case CommandRefused():
            return Unprocessable(error.message, error.remedy, code="command_failed")
    return Unavailable(error.message, error.remedy, code="sandbox_lost", retry_after_seconds=1)
