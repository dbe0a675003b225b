"""From preprocessed Metal to clang's C++ for OpenCL: the few constructs that the latter spells otherwise.

Metal and C++ for OpenCL share their address spaces, so the compiler itself refuses what Metal would refuse.
Rewritten, line by line so that line numbers stay: attributes and kernel parameters, function constants,
threadgroup variables (which come from the runtime, one guarded range each), vector constructors, half
literals, and the `thread` qualifier of constructors. Entry points of the kernel instantiations are appended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from metal_on_host.entries import ATTRIBUTES, Entry, Kernel, Parameter, entry_code
from metal_on_host.errors import MetalSourceError
from metal_on_host.tokens import Token, TokenText, tokenize

_LITERAL = re.compile(r"(?i)^(\d*\.?\d*(?:e[+-]?\d+)?)(h|bf)$")
_SCALARS = frozenset(
    ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "_Float16", "float", "bfloat")
)
_VECTORS = frozenset(f"{base}{n}" for base in (*_SCALARS, "half") for n in (2, 3, 4))
_SHIM = "metal_on_host/shim/"
_SPACES = r"\b(__global|__local|__private|__constant|constant)\b"
_NOT_FUNCTIONS = frozenset(
    (
        "if",
        "constexpr",
        "for",
        "while",
        "switch",
        "sizeof",
        "decltype",
        "alignof",
        "alignas",
        "return",
        "static_assert",
    )
)
_NOT_TYPES = frozenset(("return", "typedef", "using", "auto", "case", "goto", "delete", "else"))
_METHOD_WORDS = frozenset(("const", "__private", "__global", "__local", "constant", "__constant"))
AUTHOR_FILES = ("/header.metal", "/body.metal")


@dataclass(slots=True)
class Rewritten:
    """`preamble` is what stands before the author's own text, the same for many sources; it may be empty."""

    preamble: str
    text: str
    entries: list[Entry]


def rewrite(text: str, function_constants: Mapping[str, bool | int | float] | None = None) -> Rewritten:
    """Translates preprocessed Metal. Raises MetalSourceError with file and line for what Metal refuses."""
    preamble, author = _split_at_author(text)
    known = _Known()
    out = ""
    if author:
        out, known = _rewritten_preamble(preamble)
    rewriter = _Rewriter(tokenize(author or preamble), function_constants or {}, known)
    rewriter.run()
    entries = rewriter.entries()
    return Rewritten(out, f"{rewriter.text()}\n{entry_code(entries)}", entries)


def _split_at_author(text: str) -> tuple[str, str]:
    """The text before the first line of the author's own files (MLX's declarations), and the rest."""
    match = re.search(rf'^# \d+ "[^"]*(?:{"|".join(map(re.escape, AUTHOR_FILES))})"', text, re.MULTILINE)
    return (text[: match.start()], text[match.start() :]) if match else (text, "")


@lru_cache(maxsize=4)
def _rewritten_preamble(text: str) -> tuple[str, _Known]:
    rewriter = _Rewriter(tokenize(text), {}, _Known())
    rewriter.run()
    return rewriter.text(), rewriter.known


@dataclass(slots=True)
class _Known:
    """Names the translation has met."""

    vectors: set[str] = field(default_factory=lambda: set(_VECTORS))
    classes: set[str] = field(default_factory=set)
    kernels: dict[str, Kernel] = field(default_factory=dict)


class _Rewriter(TokenText):
    def __init__(
        self, tokens: list[Token], constants: Mapping[str, bool | int | float], known: _Known
    ) -> None:
        super().__init__(tokens)
        self.constants = constants
        self.known = _Known(set(known.vectors), set(known.classes), dict(known.kernels))
        self.wanted: list[tuple[str, str]] = []

    def run(self) -> None:
        self._check_address_spaces()
        self._literals()
        self._names_of_types()
        self._instantiations()
        bodies = self._kernels()
        self._function_constants()
        self._threadgroup_variables(bodies)
        self._strip_attributes()
        self._method_qualifiers()
        self._vector_constructors()
        self._casts()
        self._references_to_temporaries()
        self._pointer_steps()

    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    # What clang takes and Metal refuses: pointers and references of no address space, in the author's text.

    def _check_address_spaces(self) -> None:
        for i, token in enumerate(self.tokens):
            if not token.file.endswith(AUTHOR_FILES):
                continue
            if token.text == "(" and self._is_parameter_list(i):
                for start, end in self._split(i + 1, self._close(i)):
                    self._require_space(start, end)
            elif token.text in ("*", "&") and self._is_pointer_variable(i):
                self._require_space(self._statement_start(i), i + 1)

    def _is_parameter_list(self, i: int) -> bool:
        name = self._previous(i)
        if self.tokens[name].kind != "name" and self._at(name) != "]":
            return False
        if self._at(name) in _NOT_FUNCTIONS or self._at(self._previous(name)) in (".", "->", "=", "return"):
            return False
        after = self._next(self._close(i))
        while self._at(after) in _METHOD_WORDS:
            after = self._next(after)
        return self._at(after) == "{"

    def _statement_start(self, i: int) -> int:
        while i > 0 and self._at(self._previous(i)) not in ("{", "}", ";", "(", ")", ","):
            i = self._previous(i)
        return i

    def _is_pointer_variable(self, i: int) -> bool:
        start = self._statement_start(i)
        if self._at(self._previous(start)) not in ("{", "}", ";") or self._at(start) in _NOT_TYPES:
            return False
        if self._is_in_parentheses(start) or self._text(start, i).count("<") != self._text(start, i).count(
            ">"
        ):
            return False
        between = range(start, i)
        is_type = all(
            self.tokens[k].kind in ("name", "space", "marker") or self._at(k) in ("::", "<", ">")
            for k in between
        )
        name = self._next(i)
        return (
            start < i
            and is_type
            and self.tokens[name].kind == "name"
            and self._at(self._next(name)) in ("=", ";")
        )

    def _is_in_parentheses(self, i: int) -> bool:
        depth = 0
        while i > 0 and depth <= 0 and self._at(i) not in ("{", "}"):
            i -= 1
            depth += (self._at(i) == "(") - (self._at(i) == ")")
        return depth > 0

    def _require_space(self, start: int, end: int) -> None:
        text = self._text(start, end).split("=")[0]
        if re.search(r"[*&]", text) and "&&" not in text and not re.search(_SPACES, text):
            raise MetalSourceError(
                f"{self._where(start)}: error: `{text.strip()}` needs an address space "
                "(device, constant, threadgroup, thread)"
            )

    # The rewrites.

    def _literals(self) -> None:
        for token in self.tokens:
            match = _LITERAL.match(token.text) if token.kind == "number" else None
            if match and not token.text.lower().startswith("0x"):
                digits = match.group(1)
                digits += "" if "." in digits or "e" in digits.lower() else ".0"
                token.text = f"(({'__bf16' if match.group(2).lower() == 'bf' else '_Float16'}){digits}f)"

    def _names_of_types(self) -> None:
        text = "".join(" " if t.kind == "marker" else t.text for t in self.tokens)
        named = "|".join(sorted(_VECTORS))
        for match in re.finditer(rf"typedef\s+(?:metal::)?(?:vec\s*<[^;]*>|{named})\s+(\w+)\s*;", text):
            self.known.vectors.add(match.group(1))
        for match in re.finditer(rf"using\s+(\w+)\s*=\s*(?:metal::)?(?:vec\s*<[^;]*>|{named})\s*;", text):
            self.known.vectors.add(match.group(1))

        for word in ("struct", "class"):
            self.known.classes.update(self._at(self._next(i)) for i in self._names(word))

    def _attribute_at(self, i: int) -> int | None:
        """The end (exclusive) of the `[[...]]` that starts at `i`."""
        if self._at(i) != "[" or self._at(self._next(i)) != "[":
            return None
        end = self._close(i)
        return end + 1

    def _instantiations(self) -> None:
        """Records and removes `template [[host_name("x")]] [[kernel]] decltype(f<A>) f<A>;`."""
        for i in list(self._names("host_name")):
            start = i
            while self._at(start) != "template":
                start = self._previous(start)
                if start < 0 or self._at(start) == ";":
                    raise MetalSourceError(f"{self._where(i)}: host_name outside an instantiation")
            name = self._at(self._next(self._next(i))).strip('"')
            j = start
            while self._at(j) != "decltype":
                j = self._next(j)
            close = self._close(self._next(j))
            end = close
            while self._at(end) != ";":
                end = self._next(end)
            self.wanted.append((name, self._text(close + 1, end)))
            self._blank(start, end + 1)

    def _kernels(self) -> list[tuple[int, int]]:
        """Records every kernel function; returns the ranges of their bodies."""
        bodies: list[tuple[int, int]] = []
        for i in list(self._names("kernel")):
            if not self._at(i):
                continue
            j = self._next(self._attribute_end(i))
            if self._at(j) != "void":
                continue
            template = self._template_before(i)
            name = self._next(j)
            opening = self._next(name)
            closing = self._close(opening)
            parameters = self._parameters(opening + 1, closing)
            body = self._next(closing)
            if self._at(body) == "{":
                bodies.append((body, self._close(body)))
            kernel = Kernel(self._at(name), template, parameters)
            self.known.kernels[kernel.name] = kernel
            if self._at(self._previous(i)) != "[":
                self._blank(i, i + 1)
        return bodies

    def _attribute_end(self, i: int) -> int:
        """The last token of the `[[...]]` around `i`, or `i` where there is none."""
        j = i
        while self._at(j) not in ("]", "[", ";", "{", "void", ""):
            j = self._close(j) if self._at(j) == "(" else j
            j = self._next(j)
        return self._next(j) if self._at(j) == "]" else i

    def _template_before(self, i: int) -> str | None:
        j = i
        while self._at(j) not in (">", ";", "}", "") and j >= 0:
            j = self._previous(j)
        if self._at(j) != ">":
            return None
        depth, end = 0, j
        while j >= 0:
            depth += (self._at(j) == ">") - (self._at(j) == "<")
            if depth == 0:
                break
            j = self._previous(j)
        return self._text(j + 1, end) if self._at(self._previous(j)) == "template" else None

    def _parameters(self, start: int, end: int) -> tuple[Parameter, ...]:
        parameters: list[Parameter] = []
        next_index = 0
        for begin, stop in self._split(start, end):
            index: int | None = None
            attribute: str | None = None
            i = begin
            while i < stop:
                attribute_end = self._attribute_at(i)
                if attribute_end is not None:
                    inside = self._text(i, attribute_end)
                    found = re.search(r"\bbuffer\s*\(\s*(\d+)", inside)
                    if found:
                        index = int(found.group(1))
                    attribute = next((a for a in ATTRIBUTES if re.search(rf"\b{a}\b", inside)), attribute)
                    self._blank(i, attribute_end)
                    i = attribute_end
                i += 1
            text = self._text(begin, stop)
            match = re.fullmatch(r"(.*?)(\w+)", text)
            if match is None:
                raise MetalSourceError(f"{self._where(begin)}: cannot read the kernel parameter `{text}`")
            if attribute is None:
                index = next_index if index is None else index
                next_index = index + 1
            parameters.append(Parameter(match.group(2), match.group(1).strip(), index, attribute))
        return tuple(parameters)

    def _function_constants(self) -> None:
        for i in list(self._names("function_constant")):
            start = self._previous(self._previous(i))
            end = self._close(start) + 1
            after = self._next(end - 1)
            if self._at(after) != ";":
                continue
            name = self._at(self._previous(start))
            value = self.constants.get(name, 0)
            spelled = str(value).lower() if isinstance(value, bool) else repr(value)
            self._blank(start, end)
            self.tokens[after].text = f" = {spelled};"

    def _threadgroup_variables(self, bodies: list[tuple[int, int]]) -> None:
        for i in list(self._names("__local")):
            previous = self._at(self._previous(i))
            start = i
            if previous == ")":
                opening = self._open(self._previous(i))
                if self._at(self._previous(opening)) == "alignas":
                    start = self._previous(opening)
                    previous = self._at(self._previous(start))
            if previous not in ("{", "}", ";"):
                continue
            self._threadgroup_variable(start, i, bodies)

    def _threadgroup_variable(self, start: int, i: int, bodies: list[tuple[int, int]]) -> None:
        end = self._next(i)
        first: int | None = None
        j = end
        while self._at(j) != ";":
            text = self._at(j)
            if text == "<" and first is None:
                j = self._close(j)
            elif text in ("*", "&", "(") and first is None:
                if not (text == "(" and self._at(self._previous(j)) == "alignas"):
                    return
            elif text in ("[", ",", "=") and first is None:
                first = self._previous(j)
            if text in ("[", "("):
                j = self._close(j)
            j = self._next(j)
        first = self._previous(j) if first is None else first
        where = next(((a, b) for a, b in bodies if a < i < b), None)
        if where is None:
            raise MetalSourceError(
                f"{self._where(i)}: error: threadgroup variable `{self._at(first)}` must stand in a "
                "kernel's own body"
            )
        kind = self._text(start, i) + " " + self._text(i + 1, first)
        aligned = re.search(r"alignas ?\(([^()]*(?:\([^()]*\))?[^()]*)\)", kind)
        kind = kind.replace(aligned.group(), "") if aligned else kind
        out = []
        for a, b in self._split(first, j):
            name = next(k for k in range(a, b) if self.tokens[k].kind == "name")
            suffix = self._text(name + 1, b)
            if re.sub(r"\[[^\]]*\]", "", suffix).strip():
                raise MetalSourceError(f"{self._where(i)}: a threadgroup variable takes no initialiser")
            t = f"mtl_type_{self._at(name)}"
            alignment = aligned.group(1) if aligned else f"alignof({t})"
            out.append(
                f"typedef {kind.strip()} {t}{suffix}; "
                f"__local {t}& {self._at(name)} = *(__local {t}*)mtl_threadgroup("
                f'sizeof({t}), {alignment}, {self.tokens[i].line}, "{self._at(name)}");'
            )
        self._blank(start, j)
        self.tokens[start].text = " ".join(out).removesuffix(";")

    def _strip_attributes(self) -> None:
        known = (*ATTRIBUTES, "kernel", "max_total_threads_per_threadgroup", "buffer", "host_name")
        for i, token in enumerate(self.tokens):
            if token.text == "[":
                end = self._attribute_at(i)
                if end is not None and any(re.search(rf"\b{k}\b", self._text(i, end)) for k in known):
                    self._blank(i, end)

    def _method_qualifiers(self) -> None:
        """Constructors lose `thread`: with it they could not construct temporaries."""
        for i in list(self._names("__private")):
            closing = self._previous(i)
            if self._at(closing) == ")" and self._at(self._next(i)) in (":", "{", ";", "="):
                name = self._previous(self._open(closing))
                if self._at(name) in self.known.classes:
                    self.tokens[i].text = ""

    def _vector_constructors(self) -> None:
        for i, token in enumerate(self.tokens):
            if token.kind != "name" or self._at(self._previous(i)) in ("operator", "struct", "class", "~"):
                continue
            if token.text in self.known.vectors:
                last = i
            elif token.text == "vec" and self._at(self._next(i)) == "<":
                last = self._close(self._next(i))
            else:
                continue
            opening = self._next(last)
            if self._at(opening) != "(":
                continue
            scope = "" if self._at(self._previous(i)) == "::" else "metal::"
            if scope == "" and self._at(self._previous(self._previous(i))) != "metal":
                continue
            token.text = f"{scope}mtl_make<{token.text}"
            self.tokens[last].text += ">"

    def _casts(self) -> None:
        """clang has no conversion between half and bfloat; Metal has an explicit one."""
        for i in list(self._names("static_cast")):
            opening = self._next(i)
            target = self._next(opening)
            if _SHIM in self.tokens[i].file:
                continue
            if self.tokens[target].kind == "name" and self._at(self._next(target)) == ">":
                self.tokens[i].text = "metal::mtl_cast"
        for name in ("bfloat", "bfloat16_t"):
            for i in list(self._names(name)):
                is_call = self._at(self._next(i)) == "(" and _SHIM not in self.tokens[i].file
                if is_call and self._at(self._previous(i)) not in ("operator", "::"):
                    self.tokens[i].text = f"metal::mtl_cast<{name}>"

    def _references_to_temporaries(self) -> None:
        """`const thread short&` binds temporaries in Metal, and here without its address space."""
        for i in list(self._names("__private")):
            words = [self._next(i)]
            words.append(self._next(words[0]))
            if self._at(self._previous(i)) == "const":
                is_bound = self._at(words[0]) in _SCALARS and self._at(words[1]) == "&"
            else:
                is_bound = self._at(words[0]) == "const" and self._at(words[1]) in _SCALARS
                is_bound = is_bound and self._at(self._next(words[1])) == "&"
            if is_bound:
                self.tokens[i].text = ""

    def _pointer_steps(self) -> None:
        """`p += step` with a step of class type, as MLX's headers have it: clang finds no operator for it."""
        for i, token in enumerate(self.tokens):
            if token.text != "+" or self.tokens[i + 1].text != "=" or token.file.endswith(AUTHOR_FILES):
                continue
            target, step = self._previous(i), self._next(i + 1)
            is_plain = self.tokens[target].kind == self.tokens[step].kind == "name"
            if (
                is_plain
                and self._at(self._previous(target)) in (";", "{", "}")
                and self._at(self._next(step)) == ";"
            ):
                self.tokens[i].text, self.tokens[i + 1].text = "=", f" {self._at(target)} + "

    def entries(self) -> list[Entry]:
        entries = []
        for n, (host_name, expression) in enumerate(self.wanted):
            kernel = self.known.kernels.get(re.split(r"\s*<", expression)[0])
            if kernel is None:
                raise MetalSourceError(f"instantiation of an unknown kernel: {expression}")
            entries.append(Entry(host_name, kernel, expression, f"mtl_entry_{n}"))
        for kernel in self.known.kernels.values():
            if kernel.template is None:
                entries.append(Entry(kernel.name, kernel, kernel.name, f"mtl_entry_{len(entries)}"))
        return entries
