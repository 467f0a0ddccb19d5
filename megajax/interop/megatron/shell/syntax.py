"""Parse a shell script into a tree of commands. Words keep their quotes and expansions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from megajax.config.errors import UserError

NAME = r"[A-Za-z_]\w*"
DEPTH = 40
"""Levels of brackets inside of each other, and of commands inside of each other."""
BLANKS = re.compile(r"(?:[ \t]|\\\n|#.*)+")
OPERATOR = re.compile(r"\d*(?:<<<|<<-?|<&|<>|>>|>&|>\||<|>)|&>>?|&&|\|\||\|&|;;&|;&|;;|[;&|()\n]")
ARRAY = re.compile(rf"{NAME}\+?=")
"""What an array in brackets follows."""
DELIMITERS = " \t\n;&|<>()"
PROCESS = ("<(", ">(")
ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", "]]"}
"""Words that end a part of a compound command."""
REFUSED = {"select", "coproc", "until", "getopts"}
"""Commands that are not supported."""
QUOTED = re.compile(r"'[^']*'|\$'(?:[^'\\]|\\.)*+'", re.DOTALL)
NAMED = re.compile(rf"\$(?:{NAME}|[\d@*#?$!-])")
CLOSED_BY = {'"': '"', "`": "`", "${": "}", "$(": ")", "<(": ")", ">(": ")", "(": ")"}


@dataclass(frozen=True, slots=True)
class Document:
    """A here-document, with or without expansions, or the word after <<<."""

    text: str
    kind: Literal["expands", "plain", "word"]


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments, and a command with its arguments. ((text)) and [[ words ]] are commands named (( and [[."""

    line: int
    words: tuple[str, ...]
    document: Document | None = None
    output: str | None = None
    """The file that standard output goes to."""


@dataclass(frozen=True, slots=True)
class Compound:
    """Control flow: the word for it, and what the method of the interpreter for this word takes."""

    line: int
    word: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """The commands after if, elif, while or until, and their source for messages."""

    line: int
    body: "Body"
    text: str


type Node = Simple | Compound
type Body = tuple[Node, ...]


def piece_end(text: str, start: int, depth: int = 0, inside: str = "") -> int:
    """The end of the quoted text, expansion, comment or single character at `start`.

    inside: what surrounds it: " in which ' is a character, ) in which ( is a bracket, < for a here-document, in which
    quotes are characters.

    Raises:
        UserError: an unclosed quote or bracket.
    """
    first, two, is_quoted = text[start], text[start : start + 2], inside in ('"', "<")
    if first == "\\":
        return min(start + 2, len(text))
    if inside == ")" and first == "#" and text[start - 1] in " \t\n":
        return (text + "\n").index("\n", start)
    if not is_quoted and (first == "'" or two == "$'"):
        match = QUOTED.match(text, start)
        return match.end() if match else _unclosed("'", depth)
    opener = two if two in CLOSED_BY else first
    is_character = (is_quoted and opener in (*PROCESS, "(")) or (opener == "(" and inside != ")")
    if opener not in CLOSED_BY or is_character or (inside == "<" and first == '"'):
        return start + 1
    place, closer = start + len(opener), CLOSED_BY[opener]
    within = '"' if opener == '"' or (is_quoted and opener == "${") else closer
    while text[place : place + 1] != closer:
        if place >= len(text) or depth > DEPTH:
            _unclosed(opener, depth)
        if opener == "`":
            place += 2 if text[place] == "\\" else 1
        else:
            place = piece_end(text, place, depth + 1, within)
    return place + 1


def _unclosed(opener: str, depth: int) -> NoReturn:
    raise UserError(f"unclosed {opener}" if depth <= DEPTH else f"{opener} has more than {DEPTH} levels of brackets")


def pieces(text: str, inside: str = "") -> Sequence[str]:
    """A text cut into quoted texts, expansions and single characters."""
    parts, place = [], 0
    while place < len(text):
        match = NAMED.match(text, place)
        end = match.end() if match else piece_end(text, place, inside=inside)
        parts.append(text[place:end])
        place = end
    return parts


@dataclass(slots=True)
class Token:
    """A part of a script, and its line."""

    kind: str
    """word, operator, redirection, arithmetic, expands or plain (here-documents), end."""
    text: str
    line: int
    start: int


def tokens(text: str, first_line: int) -> list[Token]:
    """The tokens of a script. An array is one word; the text of a here-document is that of the token after <<.

    Raises:
        UserError: an unclosed quote, bracket or here-document, with its line.
    """
    row, documents, place, line = list[Token](), list[Token](), 0, first_line
    while place < len(text):
        start, before = place, row[-1] if row else Token("operator", "", 0, 0)
        if match := BLANKS.match(text, place):
            place = match.end()
        else:
            try:
                kind, place = _token_end(text, start, before.text)
            except UserError as error:
                raise UserError(f"line {line}: {error}") from error
            row.append(Token(kind, text[start:place], line, start))
            if kind == "word" and re.fullmatch(r"\d*<<-?", before.text):
                documents.append(row[-1])
        if text[start] == "\n":
            while documents:
                place = _document_end(text, place, line + 1, documents.pop(0))
        line += text.count("\n", start, place)
    return [*row, Token("end", "", line, place)]


def _token_end(text: str, start: int, before: str) -> tuple[str, int]:
    """The kind and the end of the token at `start`; `before` is the text of the one before it."""
    if before == "=~" and (match := re.compile(r"\S+").match(text, start)):
        # A regular expression may hold brackets and bars.
        return "word", match.end()
    if text.startswith("((", start):
        return "arithmetic", piece_end(text, start, inside=")")
    match = OPERATOR.match(text, start)
    if match and not text.startswith(PROCESS, start):
        return "redirection" if re.search("[<>]", match[0]) else "operator", match.end()
    end = start
    while end < len(text) and (text[end] not in DELIMITERS or (text.startswith(PROCESS, start) and end == start)):
        end = piece_end(text, end)
        if text.startswith("(", end) and ARRAY.fullmatch(text, start, end):
            end = piece_end(text, end, inside=")")
    return "word", end


def _document_end(text: str, place: int, line: int, token: Token) -> int:
    """Give a token the text of its here-document: the place behind it."""
    delimiter = re.sub(r"[\\'\"]", "", token.text)
    end = re.compile(rf"^\t*{re.escape(delimiter)}(?:\n|\Z)", re.MULTILINE).search(text, place)
    if end is None:
        raise UserError(f"line {line}: no line {delimiter} ends the here-document")
    token.kind = "expands" if delimiter == token.text else "plain"
    token.text = text[place : end.start()]
    return end.end()


def array_entries(text: str, line: int) -> list[str]:
    """The words of an array in brackets."""
    row = [token for token in tokens(text[1:-1], line)[:-1] if token.text != "\n"]
    for token in row:
        if token.kind != "word":
            raise UserError(f"line {token.line}: {token.text} is not allowed in an array")
    return [token.text for token in row]


def parse(text: str, first_line: int = 1) -> Body:
    """The commands of a script.

    first_line: the line of its file that the text begins at.

    Raises:
        UserError: an unclosed quote or bracket, or control flow without its end.
    """
    text = text.replace("\r\n", "\n")
    parser = _Parser(text, tokens(text, first_line))
    body = parser.body()
    if parser.token.kind != "end":
        parser.refuse_token()
    return body


@dataclass
class _Parser:
    """A place in the tokens of a text."""

    text: str
    tokens: list[Token]
    place: int = 0
    depth: int = 0

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.place]

    def fail(self, message: str) -> NoReturn:
        """Raise UserError with the line."""
        raise UserError(f"line {self.token.line}: {message}")

    def refuse_token(self) -> NoReturn:
        """Raise UserError: the next token is not expected."""
        self.fail(f"{self.token.text.strip() or 'the end'} is not expected here")

    def take(self) -> str:
        """Step behind the next token: its text."""
        token = self.token
        self.place += token.kind != "end"
        return token.text

    def takes(self, *texts: str) -> bool:
        """Step behind the next token if it is one of these."""
        return self.token.text in texts and self.take() in texts

    def expect(self, *words: str) -> str:
        """Step behind one of these tokens, after line ends."""
        self.skip_lines()
        if self.token.text not in words:
            self.fail(f"expected {' or '.join(words)}, got {self.token.text.strip() or 'the end'}")
        return self.take()

    def skip_lines(self) -> None:
        """Step behind line ends."""
        while self.takes("\n"):
            pass

    def words(self) -> tuple[str, ...]:
        """Words up to another token."""
        words = []
        while self.token.kind == "word":
            words.append(self.take())
        return tuple(words)

    def body(self, *ends: str) -> Body:
        """Commands up to one of the words `ends`, or up to ), ;; or the end."""
        self.depth += 1
        if self.depth > DEPTH:
            self.fail(f"more than {DEPTH} levels of commands")
        nodes = []
        while self.token.kind != "end" and self.token.text not in (")", ";;", ";&", ";;&", *ends):
            if not self.takes("\n", ";", "&"):
                nodes.append(self.chain())
        self.depth -= 1
        return tuple(nodes)

    def chain(self) -> Node:
        """Commands joined by && and ||."""
        line, commands, operators = self.token.line, [self.pipeline()], list[str]()
        while self.token.text in ("&&", "||"):
            operators.append(self.take())
            self.skip_lines()
            commands.append(self.pipeline())
        return Compound(line, "&&", (commands, operators)) if operators else commands[0]

    def pipeline(self) -> Node:
        """Commands joined by |."""
        line, inverse = self.token.line, False
        while self.takes("!"):
            inverse = not inverse
        commands = [self.command()]
        while self.takes("|", "|&"):
            self.skip_lines()
            commands.append(self.command())
        return Compound(line, "|", (commands, inverse)) if inverse or len(commands) > 1 else commands[0]

    def command(self) -> Node:
        """One command, with its redirections."""
        token = self.token
        if token.kind == "arithmetic":
            node: Node = Simple(token.line, ("((", self.take()[2:-2]))
        elif token.text in COMPOUND:
            self.take()
            node = COMPOUND[token.text](self, token.line)
        elif token.text in REFUSED:
            self.fail(f"{token.text} is not supported: write it otherwise")
        elif token.kind in ("operator", "end") or token.text in ENDS:
            self.refuse_token()
        else:
            return self.simple(token.line)
        self.redirections()
        return node

    def redirections(self) -> tuple[Document | None, str | None]:
        """Step behind redirections: the here-document, and the file of standard output."""
        document, output = None, None
        while self.token.kind == "redirection":
            operator, kind = self.take(), self.token.kind
            if kind not in ("word", "expands", "plain"):
                self.fail(f"{operator} has no file")
            target = self.take()
            if operator.endswith("<<<"):
                document = Document(target, "word")
            elif kind == "expands" or kind == "plain":
                document = Document(target, kind)
            elif operator.strip("1&") in (">", ">>", ">|"):
                output = target
        return document, output

    def simple(self, line: int) -> Node:
        """Words and redirections up to the end of the command; or NAME() and a function's body."""
        words, document, output = list[str](), None, None
        while self.token.kind in ("word", "redirection"):
            new_document, new_output = self.redirections()
            document, output = new_document or document, new_output or output
            words += self.words()
        if self.token.text == "(":
            if len(words) != 1 or not re.fullmatch(r"[\w:.-]+", words[0]):
                self.refuse_token()
            return self.function(line, words[0])
        return Simple(line, tuple(words), document, output)

    def function(self, line: int, name: str = "") -> Node:
        """After function, or after the name."""
        name = name or self.take()
        if self.takes("("):
            self.expect(")")
        self.skip_lines()
        return Compound(line, "function", (name, self.command()))

    def condition(self, end: str) -> Condition:
        """Commands up to `end`."""
        self.skip_lines()
        first = self.token
        body = self.body(end)
        text = " ".join(self.text[first.start : self.token.start].split()).rstrip("; ")
        self.expect(end)
        return Condition(first.line, body, text)

    def if_command(self, line: int) -> Node:
        """After if or elif."""
        condition, body, otherwise = self.condition("then"), self.body("elif", "else", "fi"), ()
        word = self.expect("elif", "else", "fi")
        if word == "elif":
            otherwise = (self.if_command(self.token.line),)
        elif word == "else":
            otherwise = self.body("fi")
            self.expect("fi")
        return Compound(line, "if", (condition, body, otherwise))

    def while_command(self, line: int) -> Node:
        """After while."""
        return Compound(line, "while", (self.condition("do"), self.loop_body()))

    def loop_body(self) -> Body:
        """Commands up to done."""
        body = self.body("done")
        self.expect("done")
        return body

    def for_command(self, line: int) -> Node:
        """After for."""
        if self.token.kind == "arithmetic":
            self.fail("for (( )) is not supported: write for NAME in 0 1 2")
        name, words = self.take(), ('"$@"',)
        self.skip_lines()
        if self.takes("in"):
            words = self.words()
        self.takes(";")
        self.expect("do")
        return Compound(line, "for", (name, words, self.loop_body()))

    def case_command(self, line: int) -> Node:
        """After case."""
        word, branches = self.take(), []
        self.expect("in")
        self.skip_lines()
        while not self.takes("esac"):
            self.takes("(")
            patterns = [self.take()]
            while self.expect("|", ")") == "|":
                patterns.append(self.take())
            branches.append((tuple(patterns), self.body("esac")))
            if self.token.text in (";&", ";;&"):
                self.fail(f"{self.token.text} is not supported: repeat the commands of the next pattern")
            self.takes(";;")
            self.skip_lines()
        return Compound(line, "case", (word, branches))

    def group(self, line: int) -> Node:
        """After { or (."""
        word = self.tokens[self.place - 1].text
        body = self.body("}")
        self.expect(")" if word == "(" else "}")
        return Compound(line, word, (body,))

    def test(self, line: int) -> Simple:
        """After [[."""
        words = ["[["]
        while not self.takes("]]"):
            if self.token.kind in ("end", "arithmetic"):
                self.refuse_token()
            words += [self.take()] if self.token.text != "\n" else self.take().split()
        return Simple(line, tuple(words))


COMPOUND: dict[str, Callable[[_Parser, int], Node]] = {
    "if": _Parser.if_command,
    "while": _Parser.while_command,
    "for": _Parser.for_command,
    "case": _Parser.case_command,
    "function": _Parser.function,
    **dict.fromkeys(("{", "("), _Parser.group),
    "[[": _Parser.test,
}
"""Reserved word -> the method that reads what follows it."""
