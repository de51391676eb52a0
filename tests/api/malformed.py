"""Requests that are wrong: as an app is handed them, and as bytes of a connection."""

import json
import random
import re
from collections.abc import Callable

from tests.api.asgi import Raw
from tests.api.conftest import REQUEST

HOST = (b"host", b"127.0.0.1:8000")
JSON = (b"content-type", b"application/json")
MODEL = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
FULL = REQUEST | {
    "model": {"name": "mine", "config": MODEL}, "cluster": "local", "pins": {"zero_stage": [1, 2], "micro_batch_size": 1},
    "objective": "throughput", "strategy": "tpe", "seed": 1, "max_seconds": 60.0, "trial_timeout": 30.0,
    "memory_limit": 10**9, "headroom": 0.1, "baseline": {"zero_stage": 1}, "engine": "native", "runner": "local",
    "confirm_repeats": 1, "control_every": 10, "allow_unstable": False, "racing": True,
    "environment_settings": ["MALLOC_ARENA_MAX=1"], "device_hours": 4.0, "run_device_hours": 100.0, "stop_margin": 0.02,
    "priority": 1, "lr": 3e-4, "weight_decay": 0.05, "clip": 0.5, "optimizer": "adamw",
}  # fmt: skip

VALUES: tuple[str, ...] = (
    "null", "true", "[]", "{}", '""', "-1", "0", "0.5", "1e999", "-1e999", "1e308", "NaN", "Infinity", "9" * 30, "1" * 5000,
    "9007199254740993", "-0", "1.0", r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', '"a\\nb"', '"' + "x" * 5000 + '"', '"Ａ"',
    '"٣"', '"../../etc/passwd"', '"/etc/passwd"', '"os:system"', '"%2e%2e%2f"', '"\u202e"', "[[[[[[[[]]]]]]]]",
    "[" * 40 + "]" * 40, "{" + ",".join(f'"k{n}":{n}' for n in range(300)) + "}", "[" + ",".join(["1"] * 300) + "]",
    '{"zero_stage": {"zero_stage": 1}}', '{"": 1}', r'{"\ud800": 1}', r'{"\u0000": 1}', '"true"', '"1"', "01", "+1", ".5",
    "'x'", "undefined", "0x10", '{"a":1,"a":2}', '{"config": {}}', '{"name": "x", "config": {"model_type": ["llama"]}}',
    '{"name": "../x", "config": {}}', "18446744073709551616", "-9223372036854775809", "4.9e-324",
)  # fmt: skip
"""JSON, or nearly."""
BYTES: tuple[bytes, ...] = (
    b"\x00", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b'"', b"\\", b"{", b"]", b"\r\n",
)  # fmt: skip
TYPES: tuple[bytes, ...] = (
    b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"application/jsonp",
    b"application/json; charset=utf-16", b"application/problem+json", b"APPLICATION/JSON;;", b"\xff",
    b"application/json, text/plain",
)  # fmt: skip
TEXTS: tuple[bytes, ...] = (
    b"", b" ", b"*", b'"', b'""', b'W/"1-0"', b'"1-0', b'"99999999999999999999-0"', b"null", b"-1", b"1e3", b"\xb2",
    b"\xff\xfe", b"\xd9\xa3", b"x" * 129, b"x" * 5000, b"a b", b"a\x00b", b"0x1", b"1.0", b"NaN", b"9" * 25,
    b"20300101-000000-aaaa", b"../../etc/passwd", b"%00", b"%ff", b"%2e%2e%2f", b"'; DROP TABLE jobs; --", b"{}", b"[]",
    b"true", b"at_000000000000_x", "２０３００１０１-000000-aaaa".encode(), b"20300101-000000-aaaa\n", b"$(id)",
    b"\x7f", b"+1", b"1_0",
)  # fmt: skip
AUTHORIZATIONS: tuple[bytes, ...] = (
    b"", b"Bearer", b"Bearer ", b"Bearer at_", b"Bearer at__", b"Bearer at_zz_x", b"Bearer at_" + b"0" * 5000, b"Basic YTpi",
    b"Bearer \xff\xfe", b"Bearer at_000000000000_\xff", b"bearer at_0_0", b"Bearer at_0_\x00", b"Digest x", b"Bearer null",
)  # fmt: skip
METHODS = ("GET", "POST", "PATCH", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "BREW", "P\u00c3ST", "")
PLACES = (
    "", "/trials", "/trials/0/attempts", "/trials/0/logs", "/trials/0/logs/text", "/trials/0/logs/stream", "/progress", "/best",
    "/export", "/events", "/events/stream",
)  # fmt: skip
VERBS = ("pause", "resume", "stop", "cancel", "clone")


class Malformed:
    """Requests that are wrong somewhere, or most probably so. The same for the same seed."""

    def __init__(self, seed: int, jobs: list[str], cursors: list[str], keys: list[bytes]) -> None:
        self._random = random.Random(seed)
        self._jobs, self._cursors, self._keys = [job.encode() for job in jobs], [job.encode() for job in cursors], keys
        self.kinds: tuple[Callable[[], Raw], ...] = (
            self.body_bytes, self.body_value, self.body_value, self.body_structure, self.content_type, self.lengths,
            self.header, self.authorization, self.target, self.query, self.method, self.other_owner, self.part_of_a_body,
        )  # fmt: skip

    def next(self) -> tuple[str, Raw]:
        """A kind of request, and one of it."""
        kind = self._random.choice(self.kinds)
        return kind.__name__, kind()

    def body_bytes(self) -> Raw:
        """JSON with bytes put in, taken out and changed."""
        body = bytearray(json.dumps(FULL).encode())
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(body))
            body[at : at + self._random.choice((0, 0, 1, 20))] = self._random.choice(
                (*BYTES, bytes([self._random.randrange(256)]))
            )
        return self._post(bytes(body))

    def body_value(self) -> Raw:
        """JSON with one value, anywhere in it, that is wrong."""
        paths = [
            *((name,) for name in FULL),
            *(("model", "config", name) for name in MODEL),
            ("pins", "zero_stage"),
            ("nonsense",),
        ]
        path, value = self._random.choice(paths), self._random.choice(VALUES)
        fields = json.loads(json.dumps(FULL))
        place = fields
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = ""
        text = json.dumps(fields).replace('""', value)
        return self._post(text.encode("utf-8", "surrogatepass"))

    def body_structure(self) -> Raw:
        """A body that is no object of these fields at all, or one of too many, or too deep."""
        value = self._random.choice(VALUES)
        deep = self._random.choice((10, 33, 500, 5_000))
        bodies: tuple[Callable[[], str], ...] = (
            lambda: value, lambda: value + value, lambda: f"[{json.dumps(REQUEST)}]", lambda: json.dumps(REQUEST)[:-1],
            lambda: "[" * deep + "]" * deep, lambda: '{"model":' * deep + "1" + "}" * deep,
            lambda: '{"model": "' + '\\"' * deep, lambda: json.dumps(dict.fromkeys(map(str, range(deep)), 1)),
        )  # fmt: skip
        return self._post(self._random.choice(bodies)().encode("utf-8", "surrogatepass"))

    def content_type(self) -> Raw:
        return self._post(json.dumps(REQUEST).encode(), (b"content-type", self._random.choice(TYPES)))

    def lengths(self) -> Raw:
        """A length that is not the body's."""
        length = self._random.choice((*TEXTS, b"2000000", b"-5", b"1e9", b"99999999999999999999999"))
        return self._post(json.dumps(REQUEST).encode(), JSON, (b"content-length", length or b"x"))

    def part_of_a_body(self) -> Raw:
        """A client that goes away, or sends more than it may, in parts."""
        if self._random.random() < 0.9:
            body = json.dumps(REQUEST).encode()
            cut = self._random.randrange(len(body))
            return Raw(method="POST", headers=(HOST, JSON, *self._key()), body=(body[:cut],), ends=False)
        part = b"[" + b"1," * 200_000
        return Raw(method="POST", headers=(HOST, JSON, *self._key()), body=(part,) * 4)

    def header(self) -> Raw:
        name = self._random.choice(
            (b"idempotency-key", b"if-match", b"if-none-match", b"last-event-id", b"host", b"origin", b"accept")
        )
        text = self._random.choice(
            (*TEXTS, b"[", b"[::1", b"http://[x", b"localhost:99999999", b"evil.example", b"//", b"\xe2\x84\xaa")
        )
        headers = (*((HOST,) if name != b"host" else ()), *self._key(), (name, text))
        job = self._random.choice(self._jobs).decode()
        if name == b"idempotency-key" and self._random.random() < 0.7:
            return Raw(method="POST", headers=(*headers, JSON), body=(self._random.choice((b"{}", b'{"model": 1}')),))
        if name == b"if-match":
            body = b'{"trials": 5}' if text not in (b"*",) else b"{}"
            return Raw(method="PATCH", target=f"/v1/jobs/{job}".encode(), headers=(*headers, JSON), body=(body,))
        target = f"/v1/jobs/{job}" + ("/events/stream" if name == b"last-event-id" else "")
        return Raw(target=target.encode(), headers=headers)

    def authorization(self) -> Raw:
        """A key that is none: no request gets by, whatever it asks."""
        header = (b"authorization", self._random.choice((*AUTHORIZATIONS, *(b"Bearer " + text for text in TEXTS))))
        if self._random.random() < 0.5:
            return Raw(method="POST", headers=(HOST, JSON, header), body=(json.dumps(REQUEST).encode(),))
        place = self._random.choice((*PLACES, *(f"/{verb}" for verb in VERBS)))
        method = "POST" if place[1:] in VERBS else "GET"
        return Raw(
            method=method, target=b"/v1/jobs/" + self._random.choice(self._jobs) + place.encode(), headers=(HOST, header)
        )

    def target(self) -> Raw:
        """Paths that are no job's, or no path."""
        text = self._random.choice((*TEXTS, *BYTES, b"/", b"//", b".", b"..", b"%2f", b"%c0%af", b"%ED%A0%80", b"%F0%9F%92%A9"))
        job = self._random.choice(self._jobs)
        target = self._random.choice((
            b"/v1/jobs/" + text, b"/v1/jobs/" + text + b"/best", b"/v1/jobs/" + job + text, b"/" + text, text,
            b"/v1/jobs/" + job + b"/trials/" + text + b"/attempts", b"/v1/" + text + b"/count", b"/v1/jobs/" + job[:-1],
            b"/v1/jobs/" + job.upper(), b"/v1/jobs/" + job + b"/" + text, b"/docs/" + text,
        ))  # fmt: skip
        method = self._random.choice(("GET", "GET", "POST"))
        return Raw(method=method, target=target.replace(b"?", b""), headers=(HOST, *self._key()))

    def query(self) -> Raw:
        """Query strings of every operation that has one."""
        job = self._random.choice(self._jobs)
        names = {
            b"/v1/jobs": (b"limit", b"cursor", b"state", b"submitter"), b"/v1/jobs/" + job + b"/trials": (b"limit", b"cursor"),
            b"/v1/jobs/" + job + b"/events": (b"after", b"limit"), b"/v1/jobs/" + job + b"/export": (b"format",),
            b"/v1/jobs/" + job + b"/events/stream": (b"after", b"progress"),
            b"/v1/jobs/" + job + b"/trials/0/logs": (b"after", b"limit", b"attempt", b"rank"),
            b"/v1/jobs/" + job + b"/trials/0/logs/text": (b"attempt", b"rank", b"tail"),
        }  # fmt: skip
        path = self._random.choice(list(names))
        pairs = [
            self._random.choice(names[path]) + b"=" + self._random.choice(TEXTS) for _ in range(self._random.randint(1, 3))
        ]
        return Raw(target=path + b"?" + self._random.choice((b"&", b";", b"&&")).join(pairs), headers=(HOST, *self._key()))

    def method(self) -> Raw:
        """Methods that the path does not have."""
        path = self._random.choice(
            (b"/v1/jobs", b"/v1/jobs/" + self._jobs[0], b"/v1/models", b"/livez", b"/nowhere", b"/v1/spaces/count")
        )
        method = self._random.choice(METHODS)
        if (method, path) in (("POST", b"/v1/jobs"), ("POST", b"/v1/spaces/count")):
            return self._post(b"{}")
        return Raw(method=method, target=path, headers=(HOST, *self._key()))

    def other_owner(self) -> Raw:
        """Jobs and cursors of somebody else."""
        job = self._random.choice(self._cursors)
        header = (b"authorization", self._keys[0])
        place = self._random.choice((*PLACES, *(f"/{verb}" for verb in VERBS), "?"))
        if place == "?":
            return Raw(target=b"/v1/jobs?cursor=" + job, headers=(HOST, header))
        return Raw(
            method="POST" if place[1:] in VERBS else "GET", target=b"/v1/jobs/" + job + place.encode(), headers=(HOST, header)
        )

    def _post(self, body: bytes, *headers: tuple[bytes, bytes]) -> Raw:
        target = self._random.choice((b"/v1/jobs", b"/v1/jobs", b"/v1/spaces/count", b"/v1/spaces/validate"))
        return Raw(method="POST", target=target, headers=(HOST, *(headers or (JSON,)), *self._key()), body=(body,))

    def _key(self) -> tuple[tuple[bytes, bytes], ...]:
        return ((b"authorization", self._random.choice(self._keys)),)


def _get(more: bytes, path: bytes = b"/livez") -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + more + b"\r\n"


def _post(headers: bytes, body: bytes) -> bytes:
    return b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n" + body


WIRE: tuple[bytes, ...] = (
    b"", b"\r\n\r\n", b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET", b"GET /livez",
    b"GET /livez HTTP/9.9\r\n\r\n", b"GET /livez HTTP/1.1\r\n\r\n", b"GET /livez HTTP/1.1\nHost: localhost\n\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"G\xc3\x8bT / HTTP/1.1\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", _get(b"", b"/" + b"a" * 100_000),
    _get(b"", b"\xff\xfe"), _get(b"", b"http://evil.example/v1/jobs"), _get(b"", b"/v1/jobs\x00"), _get(b"Host: localhost\r\n"),
    _get(b" folded: x\r\n"), _get(b"X: " + b"y" * 200_000 + b"\r\n"), _get(b"A: b\r\n" * 5000),
    _post(b"Content-Length: 5\r\nContent-Length: 6", b"{}"), _post(b"Content-Length: -1", b"{}"),
    _post(b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
    _post(b"Transfer-Encoding: chunked", b"zz\r\n"), _post(b"Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n{}\r\n"),
    _post(b"Transfer-Encoding: gzip, identity", b"{}"), _post(b"Expect: 100-continue\r\nContent-Length: 2", b""),
)  # fmt: skip
"""What is no HTTP, or two things at once."""


def on_the_wire(request: Raw, chunked: bool) -> bytes:
    """The request as bytes, with a length or in chunks. Line breaks would only end its header early."""
    target = re.sub(rb"[\r\n ]", b"+", request.target)
    lines = [request.method.encode("latin-1") + b" " + (target or b"/") + b" HTTP/1.1", b"Connection: close"]
    lines += [name + b": " + re.sub(rb"[\r\n]", b"", value) for name, value in request.headers]
    body = b"".join(request.body)
    if chunked:
        lines.append(b"Transfer-Encoding: chunked")
        end = b"0\r\n\r\n" if request.ends else b""
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in request.body if part) + end
    elif not any(name == b"content-length" for name, _ in request.headers):
        lines.append(b"Content-Length: %d" % (len(body) + (0 if request.ends else 100)))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
