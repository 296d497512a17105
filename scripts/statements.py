"""The numbered statements in short, what of them is open, and where the tests name them.

A test names what it proves by a comment in or beside it (`# contract 17`, `# R4, P2`) or by the marker
`@pytest.mark.contract("P2")`. A comment counts only if the numbers stand first in it, so that prose about a number does
not.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

CONTRACT = """
1 A lease goes back exactly once, and only with evidence for every attempt made on it
2 A read goes back when access has ended; it needs no settle
3 A write goes back when its result is fixed, access has ended and it is settled; any two of them are not enough
4 A write that was given up goes back as discarded; a later success does not change that
5 A lease that went back is never marked, released or polled again; settling it again changes nothing
6 A lease is not polled again once its view was seen
7 A return that fails is never tried again, and stops that lender's domain
8 An attempt is kept until its late word was heard, also after its lease was given up
9 Dropping a reference frees nothing
10 A lease has one owner; handing it over is unconditional
11 One lease, one operation
12 A poll gives one and the same view, nothing while waiting or after a failure, and raises after release
13 A failure is final, and a lease that failed at once has changed nothing
14 Writes are marked once, after the view; a wrong mask records nothing
15 Release is legal in every state, and acts once
16 Arguments that fit nothing raise before anything changes; refusals by state are failed leases
17 A row counts only if it arrived whole, on the page that was lent
18 Pages of a write that was seen and not marked are not used again
19 A write released before its view was seen needs no mark and brings nothing
20 Waiting leases are granted in order; one without rows does not wait
21 When a request is freed, its waiting leases fail and granted ones go on
22 In place: pages that are lent are neither moved nor taken from their request
23 No second transfer into the same content while the first has not settled
24 After forgetting names nothing is lent by them; who reads already goes on
25 Nothing that was brought counts before it is settled or given up
26 Over ranks, the prompt resumes between the largest floor and the smallest end, or from the start
27 Resuming never goes behind what was there before
28 What can be used ends at the first hole
29 An outcome is stable once told, and asking never blocks
30 A miss is no failure, and a failure is never told as a miss
31 What arrived is among what was asked for; the rest is untouched
32 A submission is rejected only if nothing of it escaped
33 An unknown error of a submission means that bytes may be moving: the lease stays
34 A question about some attempts is answered for those alone
35 Registrations do not overlap; a failure registers nothing
36 What arrives becomes visible page by page; a repeat takes nothing away
37 Names cover everything that could make bytes differ
38 Asking what is there reserves nothing
39 A cancel is a request, sent at most once; the first outcome stands
40 Cancel, timeout, destruction of sessions, elapsed time and silence are no evidence
41 Evidence: never submitted, that very operation completed, the peer's word, or a fence over all who could
42 Memory counts as accessible before its address can leave
43 An attempt in doubt leaves doubt only by that same operation's end
44 Words about unknown attempts and contradictions advance nothing
45 A physical result is heard whether or not anybody still waits for it
46 A late end may free memory, and never changes an outcome that was told
47 Every range is checked against lease and generation before anything is submitted
48 A word of an older epoch, generation or attempt can neither free nor create anything
49 A cancel that races with the start has two outcomes, and is remembered if it comes first
50 What is remembered is bounded, and never by dropping what is alive
51 No foreign call under a lock; draining does not block the loop
52 No extra exchange in an undisturbed transfer
53 A grace period after the deadline, ended by force
54 Shutdown in order; what is not drained is reported and stays mapped
55 Memory is let go only when every lease came back and every registration is closed
56 Shutdown is repeatable and says what is left
R1 One holder for peers, engine, stores and third parties
R2 Taking a lease always takes it; what stands in the way becomes a fact
R3 How a kind is submitted is said once; the view reaches the backend unchanged
R4 A round has four calls; idle it costs nothing that grows
R5 Facts are one batch of columns
R6 All parties return a lease by the same decision
R7 Agreement is one exchange that every party takes part in
R8 Stop, drain and idle follow from what is agreed
R9 One wake signal for each backend, after what changed was listed
R10 Pages are lent at the engine's own events
R11 Assembly builds backends from data; they never meet the lender
R12 The request's owner has the only deadline, and late rows count
R13 No timed lifecycle: deadlines above, evidence in the backend, holding in the holder
R14 An uncertain submission stops its peer or its binding, as the binding says
R15 Shutdown never raises, and lets memory go binding by binding
R16 Cleanup that is not complete is told, not raised
R17 Shutdown has a reason of its own
R18 Isolate and keep, with a bound on what is kept
R19 Leases that keep requests from running are published
R20 What holding costs is published for admission
R21 One ladder of errors: a part's fault stops that part
R22 One writer per request at a time
R23 What is off costs nothing
R24 A least set of counters
P1 A generation is odd while a page is written; only sealed pages are read
P2 The look after reading is compared with the grant
P3 No second attempt on a page before the first one's access ended
P4 A lease has fixed readers, and each owes its own evidence
P5 Fencing is for checked readers only, and never triggered by time
P6 A process is dead when its pidfd, opened while it was connected, says so
P7 The source closing its endpoint proves nothing about mapped memory
P8 A successor never takes over memory that a predecessor may still touch
P9 Find, pin and generation are one step; insertion is if absent
P10 Names become visible when all parties have applied the decision
P11 Giving up locally is told, and voids a later decision
P12 Opening, settling, voiding and cancelling share one order
P13 A new coordinator makes its term known and catches up before it decides
P14 The record of a term does not age out
P15 Decisions are a chain, and kept until all have applied them
P16 An epoch is compared for equality
P17 Bounds and outcome are written once; a contradiction is a failure
P18 Questions carry the reader's key; repeats get the same lease; a release is repeated until confirmed
P19 No backoff on the queue's consumer
P20 Only who holds a request's claim may take it off the queue
P21 The claim, not the queue, refuses what is running
P22 What the queue offers again joins its own transfer
P23 Requests that ran out of deliveries are found by asking
P24 Bounds on the queue hold for each destination
P25 Heartbeats name the last decision; only the broker repeats facts live
P26 What is lent, retained and quarantined leaves the engine its longest prompt
H1 Checks come in one order: body, fields, list of sources, repeat, load
H2 A body that is no JSON, no source, neither messages nor prompt: 400; an empty prompt counts as one
H3 JSON that is no object: 400
H4 Without a list, or for a source that is not on it: 403; neither that nor a 400 touches a counter
H5 The list is read entry by entry, and what cannot be compared is refused
H6 Messages win over a prompt
H7 One prompt has one request hash whatever the order of its keys, and no two kinds of prompt share one
H8 The request hash covers model, source and salt
H9 A repeat within the dedup time joins, and does not prolong that time
H10 A repeat is told before load
H11 At the cap a request is skipped, and nothing of it is kept
H12 What is taken on is remembered before the transfer begins
H13 Every success is 202; how it ends is told by its hash
H14 The source computes what it lacks, if that is wanted, and lends it
H15 What is brought goes through the destination's own checks
H16 Transferred means that pages are held, and is told with pages and bytes
H17 A failure is counted, and a retry starts at once
H18 A place is given back in every case
H19 fired = transferred + failed + inflight at every instant, whatever goes wrong
H20 Who joined a request hears of its failure
H21 A transfer has one budget, and the end of one forgets no other
H22 A dedup time of 0 leaves all other bounds in place
H23 Nothing is fetched from what a source names; it stands for a registered instance or for nothing
H24 What is remembered is bounded, at constant cost for each request
H25 The defaults are the published ones
H26 Several gateways share what the destination knows
H27 In the engine, one final result for a transfer, after the usual setup
H28 The next request reuses what came, and its output is the same
H29 The counters are exactly the published ones
H30 No door hands out what a source says of its transport
H31 What a source holds is found by name, pinned while it is lent, and unpinned whatever happens
H32 Blocks that the source lacks fail that request alone
H33 A prefix may be brought, and what is held is not brought again
H34 A partial last block counts nowhere
H35 What was learned of a source goes stale when it starts again
H36 A pull of what the source does not have says so
H37 A hint with a request names a source; without it, or when it fails, the prompt is computed
H38 Hosts are compared in one form; an entry that cannot be read stops the start
"""
"""Number and short form, one a line."""

OPEN = {
    "22": "No engine shrinks or suspends a request here; proved is that pages that a request and peers share stay put.",
    "53": "R13 rules it out: there is no grace period to test. What stands in its place is R12.",
    "R7": "Members agree over the bus, outside any engine's step; no engine's own collective carries it.",
    "R8": "Shares are opened, kept and ended by agreed state only; a stopping worker still drains by its own.",
    "R10": "No engine hands over its scheduler's events yet; a destination lends when a transfer is resolved.",
    "R22": "Nothing but kvbus writes into its pools: there is no native path that could meet a transfer.",
    "P14": "The record is rewritten on simulated time; a real broker trims a short log here, not a day-old one.",
    "P15": "Proved with the simulated broker; a real one has not lost its power in the middle of a decision here.",
    "P20": "The claim is the broker's record of a delivery, and its age: an ack that is late on the wire still counts.",
    "P23": "The queue has no last delivery, so nothing runs out: what was offered too often ends as a failed outcome.",
    "P24": "The bound for each destination is kept by requesters; the broker bounds all together, and each consumer.",
    "H27": "No transfer enters the engine's batch: pages move beside it, and there is no result to finish.",
    "H31": "The source's side is that of P9 and 34, whoever asked; nothing of it is HTTP.",
}
"""Statements that cannot be proved here yet, wholly or in part, each with the reason."""

_NUMBER = r"(?:contract )?[RPH]?\d+(?:[–-]\d+)?"
_REFERENCE = re.compile(rf"#\s*((?:contract [RPH]?|[RPH])\d+(?:[–-]\d+)?(?:[,;] {_NUMBER})*)(?=$|[:;])")
_PARTS = re.compile(r"([RPH]?)(\d+)(?:[–-](\d+))?")

Proof = tuple[str, str]
"""File below the root, and name of the test in it."""


def titles() -> dict[str, str]:
    """Return the statements in their order: number → short form."""
    lines = (line.partition(" ") for line in CONTRACT.strip().splitlines())
    return {number: title for number, _, title in lines}


def numbers_of(comment: str) -> Iterator[str]:
    """Yield the statements that a comment names first."""
    found = _REFERENCE.match(comment.strip())
    for kind, first, last in _PARTS.findall(found.group(1)) if found else ():
        for number in range(int(first), int(last or first) + 1):
            yield f"{kind}{number}"


def proofs(root: Path) -> dict[str, list[Proof]]:
    """Return number → the tests that name it, in the order of files and lines; ValueError for a number that is none."""
    found: dict[str, list[Proof]] = {number: [] for number in titles()}
    for path in sorted((root / "tests").rglob("*.py")):
        file, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        for line, number, test in sorted(_named(source)):
            if number not in found:
                raise ValueError(f"{file}:{line} names statement {number!r}, which does not exist")
            if (file, test) not in found[number]:
                found[number].append((file, test))
    return found


def _named(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, number and test of each statement that a file of tests names."""
    tree = ast.parse(source)
    spans = list(_spans(tree))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for number in numbers_of(token.string):
                yield token.start[0], number, _test_at(spans, token.start[0])
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="contract"), args=[ast.Constant(value=str(number))]):
                for one in list(numbers_of(f"# contract {number}")) or [number]:
                    yield node.lineno, one, _test_at(spans, node.lineno)
            case _:
                pass


def _spans(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """Yield first line (decorators and the comments above included), last line and name of what can hold a marker."""
    before = 0
    for node in tree.body:
        end = node.end_lineno or node.lineno
        name = getattr(node, "name", "")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if isinstance(node, ast.ClassDef):
            yield from ((one.lineno, one.end_lineno or 0, one.name) for one in _functions(node))
        yield before + 1, end, name
        before = end


def _functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def _test_at(spans: list[tuple[int, int, str]], line: int) -> str:
    """Return the name of what stands at a line; the first that holds it, so that a method goes before its class."""
    return next((name for first, last, name in spans if first <= line <= last), "") or "(no test)"
