"""Parse a shell script into a tree of commands. Words keep their quotes and expansions."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megajax.config.errors import UserError
from megajax.tools.shell.tree import (
    Arithmetic,
    Array,
    Body,
    Case,
    Chain,
    Condition,
    Count,
    Document,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Simple,
    Test,
    While,
)

NAME = r"[A-Za-z_]\w*"
DEPTH = 40
"""Levels of brackets inside of each other, and of commands inside of each other."""
BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
OPERATOR = re.compile(r"\d*(?:<<<|<<-?|<&|<>|>>|>&|>\||<|>)|&>>?|&&|\|\||\|&|;;&|;;|;&|[;&|()\n]")
ARRAY = re.compile(rf"({NAME}(?:\[[^]=]*\])?\+?=)\(")
DELIMITERS = " \t\n;&|<>()"
ENDS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", "]]"}
"""Words that end a part of a compound command."""
SINGLE = re.compile(r"'[^']*'")
ESCAPED = re.compile(r"\$'(?:[^'\\]|\\.)*+'", re.DOTALL)
PROCESS = re.compile(r"[<>]\(")
TEXT = re.compile(r"\S+")
QUOTED_CHARACTERS = ("<(", ">(", "(")
CLOSED_BY = {'"': '"', "`": "`", "${": "}", "$(": ")", "<(": ")", ">(": ")", "(": ")"}


def piece_end(text: str, start: int, depth: int = 0, inside: str = "") -> int:
    """The end of the quoted text, expansion or single character at `start`.

    inside: what surrounds it: " in which ' is a character, ) in which ( is a bracket, < for a here-document, in which
    quotes are characters.

    Raises:
        UserError: an unclosed quote or bracket.
    """
    first, two, is_quoted = text[start], text[start : start + 2], inside in ('"', "<")
    if inside == "<" and first == '"':
        return start + 1
    if first == "\\":
        return min(start + 2, len(text))
    if not is_quoted and (first == "'" or two == "$'"):
        match = (SINGLE if first == "'" else ESCAPED).match(text, start)
        return match.end() if match else _unclosed("'", depth)
    opener = two if two in CLOSED_BY else first
    if opener not in CLOSED_BY or (is_quoted and opener in QUOTED_CHARACTERS) or (opener == "(" and inside != ")"):
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


def _unclosed(opener: str, depth: int) -> int:
    raise UserError(f"unclosed {opener}" if depth <= DEPTH else f"{opener} has more than {DEPTH} levels of brackets")


def parse(text: str, first_line: int = 1) -> Body:
    """The commands of a script.

    first_line: the line of its file that the text begins at.

    Raises:
        UserError: an unclosed quote or bracket, or control flow without its end.
    """
    parser = _Parser(text.replace("\r\n", "\n"), first_line)
    body = parser.body()
    kind, token = parser.peek()
    if kind != "end":
        parser.fail(f"{token.strip() or 'the end of the line'} is not expected here")
    return body


@dataclass
class _Parser:
    """A place in a text. Tokens are ("word" | "array" | "operator" | "redirection" | "end", text)."""

    text: str
    first_line: int
    place: int = 0
    depth: int = 0
    counted: tuple[int, int] = (0, 0)
    """A place, and the number of line ends before it."""
    documents: list[Document] = field(default_factory=list)
    """Here-documents whose text follows the current line."""

    def line(self) -> int:
        """The line of the current place."""
        place, count = self.counted
        if place > self.place:
            place, count = 0, 0
        self.counted = self.place, count + self.text.count("\n", place, self.place)
        return self.first_line + self.counted[1]

    def fail(self, message: str) -> None:
        """Raise UserError with the line."""
        raise UserError(f"line {self.line()}: {message}")

    def peek(self) -> tuple[str, str]:
        """The kind and the text of the next token; `place` is at its beginning."""
        while (match := BLANKS.match(self.text, self.place)) or self.text.startswith("#", self.place):
            self.place = match.end() if match else (self.text + "\n").index("\n", self.place)
        if self.place >= len(self.text):
            return "end", ""
        if match := ARRAY.match(self.text, self.place):
            return "array", match[1]
        match = OPERATOR.match(self.text, self.place)
        if match and not PROCESS.match(self.text, self.place):
            return "redirection" if match[0].strip("0123456789&")[:1] in ("<", ">") else "operator", match[0]
        return "word", self.text[self.place : self._word_end()]

    def _word_end(self) -> int:
        end = self.place
        try:
            while end < len(self.text):
                if self.text[end] in DELIMITERS and self.text[end : end + 2] not in ("<(", ">("):
                    break
                if self.text[end] in "<>" and end > self.place:
                    break
                end = piece_end(self.text, end)
        except UserError as error:
            self.fail(str(error))
        return end

    def take(self) -> str:
        """Step behind the next token, and behind the here-documents that follow a line."""
        _, token = self.peek()
        self.place += len(token)
        if token == "\n":
            for document in self.documents:
                self._read_document(document)
            self.documents.clear()
        return token

    def _read_document(self, document: Document) -> None:
        lines, start = [], self.line()
        while self.place < len(self.text):
            end = (self.text.find("\n", self.place) + 1 or len(self.text) + 1) - 1
            line, self.place = self.text[self.place : end], min(end + 1, len(self.text))
            if line.lstrip("\t") == document.delimiter:
                break
            lines.append(line)
        else:
            raise UserError(f"line {start}: no line {document.delimiter} ends the here-document")
        document.text = "\n".join(lines) + "\n"

    def expect(self, *words: str) -> str:
        """Step behind one of these tokens, after line ends."""
        self.skip_lines()
        _, token = self.peek()
        if token not in words:
            self.fail(f"expected {' or '.join(words)}, got {token.strip() or 'the end'}")
        return self.take()

    def skip_lines(self) -> None:
        """Step behind line ends."""
        while self.peek() == ("operator", "\n"):
            self.take()

    def body(self, *ends: str) -> Body:
        """Commands up to one of the words `ends`, or up to ), ;; or the end."""
        self.depth += 1
        if self.depth > DEPTH:
            self.fail(f"more than {DEPTH} levels of commands")
        nodes = []
        while True:
            kind, token = self.peek()
            if kind == "operator" and token in ("\n", ";", "&"):
                self.take()
            elif kind == "end" or token in (")", ";;", ";&", ";;&") or (kind == "word" and token in ends):
                self.depth -= 1
                return tuple(nodes)
            else:
                nodes.append(self.chain())

    def chain(self) -> Node:
        """Commands joined by && and ||."""
        line = self.line()
        commands, operators = [self.pipeline()], list[str]()
        while self.peek()[1] in ("&&", "||"):
            operators.append(self.take())
            self.skip_lines()
            commands.append(self.pipeline())
        return Chain(line, tuple(commands), tuple(operators)) if operators else commands[0]

    def pipeline(self) -> Node:
        """Commands joined by |."""
        self.peek()
        line, inverse = self.line(), False
        while self.peek() == ("word", "!"):
            self.take()
            inverse = not inverse
        commands = [self.command()]
        while self.peek()[1] in ("|", "|&"):
            self.take()
            self.skip_lines()
            commands.append(self.command())
        return Pipeline(line, tuple(commands), inverse) if inverse or len(commands) > 1 else commands[0]

    def command(self) -> Node:
        """One command, with its redirections."""
        kind, token = self.peek()
        line = self.line()
        if kind == "operator" and token == "(":
            if self.text.startswith("((", self.place):
                node: Node = Arithmetic(line, self.double_brackets())
            else:
                self.take()
                body = self.body()
                self.expect(")")
                node = Group(line, body, subshell=True)
        elif kind == "word" and token in COMPOUND:
            self.take()
            node = COMPOUND[token](self, line)
        elif kind in ("operator", "end") or (kind == "word" and token in ENDS):
            self.fail(f"{token.strip() or 'the end'} is not expected here")
        else:
            return self.simple(line)
        self.redirections()
        return node

    def double_brackets(self) -> str:
        """The text inside of (( ))."""
        end = self.place
        try:
            end = piece_end(self.text, self.place, inside=")")
        except UserError as error:
            self.fail(str(error))
        inner, self.place = self.text[self.place + 2 : end - 2], end
        return inner

    def redirections(self) -> tuple[Document | None, str | None]:
        """Step behind redirections: the here-document, and the file of standard output."""
        document, output = None, None
        while self.peek()[0] == "redirection":
            operator = self.take()
            kind, target = self.peek()
            if kind != "word":
                self.fail(f"{operator} has no file")
            self.take()
            if operator.endswith("<<<"):
                document = Document("", target)
            elif operator.endswith(("<<", "<<-")):
                document = Document(re.sub(r"[\\'\"]", "", target), expands=not re.search(r"[\\'\"]", target))
                self.documents.append(document)
            elif operator.strip("1&") in (">", ">>", ">|"):
                output = target
        return document, output

    def simple(self, line: int) -> Node:
        """Words, arrays and redirections up to the end of the command; or NAME() and a function's body."""
        words, document, output = list[str | Array](), None, None
        while True:
            kind, token = self.peek()
            if kind == "redirection":
                new_document, new_output = self.redirections()
                document, output = new_document or document, new_output or output
            elif kind == "array":
                words.append(self.array())
            elif kind == "word":
                words.append(self.take())
            elif token == "(" and len(words) == 1 and isinstance(words[0], str) and re.fullmatch(r"[\w:.-]+", words[0]):
                self.take()
                self.expect(")")
                self.skip_lines()
                return Function(line, words[0], self.command())
            elif token == "(":
                self.fail("( is not expected here")
            else:
                return Simple(line, tuple(words), document, output)

    def array(self) -> Array:
        """NAME=( entries )."""
        line, start = self.line(), self.take()
        self.place += 1
        entries = []
        while True:
            self.skip_lines()
            kind, token = self.peek()
            if kind == "end":
                raise UserError(f"line {line}: unclosed (")
            if token == ")":
                self.take()
                return Array(start, tuple(entries))
            if kind not in ("word", "array"):
                self.fail(f"{token} is not allowed in an array")
            entries.append(self.take())

    def condition(self, *ends: str) -> Condition:
        """Commands up to `ends`, which is not stepped behind."""
        self.skip_lines()
        start, line = self.place, self.line()
        body = self.body(*ends)
        text = " ".join(self.text[start : self.place].split()).rstrip("; ")
        return Condition(line, body, text)

    def if_command(self, line: int) -> If:
        """After if."""
        branches, otherwise, word = [], (), "if"
        while word in ("if", "elif"):
            condition = self.condition("then")
            self.expect("then")
            branches.append((condition, self.body("elif", "else", "fi")))
            word = self.expect("elif", "else", "fi")
        if word == "else":
            otherwise = self.body("fi")
            self.expect("fi")
        return If(line, tuple(branches), otherwise)

    def while_command(self, line: int) -> While:
        """After while."""
        condition = self.condition("do")
        return While(line, condition, self.loop_body(), until=False)

    def until_command(self, line: int) -> While:
        """After until."""
        condition = self.condition("do")
        return While(line, condition, self.loop_body(), until=True)

    def loop_body(self) -> Body:
        """do commands done."""
        if self.peek()[1] == ";":
            self.take()
        self.expect("do")
        body = self.body("done")
        self.expect("done")
        return body

    def for_command(self, line: int) -> Node:
        """After for."""
        self.peek()
        if self.text.startswith("((", self.place):
            parts = tuple(self.double_brackets().split(";"))
            if len(parts) != 3:
                self.fail("for (( )) needs three parts")
            return Count(line, parts, self.loop_body())
        name, words = self.take(), None
        self.skip_lines()
        if self.peek() == ("word", "in"):
            self.take()
            words = self.words()
        return For(line, name, words, self.loop_body())

    def words(self) -> tuple[str, ...]:
        """Words up to another token."""
        words = []
        while self.peek()[0] == "word":
            words.append(self.take())
        return tuple(words)

    def case_command(self, line: int) -> Case:
        """After case."""
        self.peek()
        word, branches = self.take(), []
        self.expect("in")
        self.skip_lines()
        while self.peek() != ("word", "esac"):
            if self.peek()[1] == "(":
                self.take()
            patterns = [self.take()]
            while self.expect("|", ")") == "|":
                patterns.append(self.take())
            branches.append((tuple(patterns), self.body("esac")))
            if self.peek()[1] in (";&", ";;&"):
                self.fail(f"{self.peek()[1]} is not supported")
            if self.peek()[1] == ";;":
                self.take()
            self.skip_lines()
            if self.peek()[0] == "end":
                raise UserError(f"line {line}: case without esac")
        self.take()
        return Case(line, word, tuple(branches))

    def function_command(self, line: int) -> Function:
        """After function."""
        self.peek()
        name = self.take()
        if self.peek()[1] == "(":
            self.take()
            self.expect(")")
        self.skip_lines()
        return Function(line, name, self.command())

    def group_command(self, line: int) -> Group:
        """After {."""
        body = self.body("}")
        self.expect("}")
        return Group(line, body, subshell=False)

    def test_command(self, line: int) -> Test:
        """After [[."""
        words = []
        while (token := self.peek()) != ("word", "]]"):
            if token[0] == "end":
                raise UserError(f"line {line}: [[ without ]]")
            if words and words[-1] == "=~":
                # A regular expression may hold brackets and bars.
                match = TEXT.match(self.text, self.place)
                words.append(match[0] if match else "")
                self.place += len(words[-1])
            elif self.take() != "\n":
                words.append(token[1])
        self.take()
        return Test(line, tuple(words))

    def refuse_select(self, line: int) -> Node:
        """After select or coproc."""
        raise UserError(f"line {line}: select and coproc are not supported: remove them from the script")


COMPOUND: dict[str, Callable[[_Parser, int], Node]] = {
    "if": _Parser.if_command,
    "while": _Parser.while_command,
    "until": _Parser.until_command,
    "for": _Parser.for_command,
    "case": _Parser.case_command,
    "function": _Parser.function_command,
    "{": _Parser.group_command,
    "[[": _Parser.test_command,
    "select": _Parser.refuse_select,
    "coproc": _Parser.refuse_select,
}
"""Reserved word -> the method that reads what follows it."""


def pieces(text: str, inside: str = "") -> Sequence[str]:
    """A text cut into quoted texts, expansions and single characters."""
    parts, place = [], 0
    while place < len(text):
        match = NAMED.match(text, place)
        end = match.end() if match else piece_end(text, place, inside=inside)
        parts.append(text[place:end])
        place = end
    return parts


NAMED = re.compile(rf"\$(?:{NAME}|[\d@*#?$!-])")
