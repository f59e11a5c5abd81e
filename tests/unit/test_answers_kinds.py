# ruff: noqa: RUF001
"""Verdicts by the kind of an answer, on labelled pairs: right answers accepted, wrong ones not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from messages import unpadded

from benchmarks.rewards import KINDS, PAIRS, SIBLINGS, Pair, load, read_pairs, score_all, table
from recipe.math.answers import MathScorer, Status, spelling
from recipe.math.answers import judge as judging
from recipe.math.answers.extraction import answer_texts
from recipe.math.answers.spelling import cleaned


@pytest.fixture(scope="module")
def scorer() -> Iterator[MathScorer]:
    with MathScorer(n_workers=2, time_limit_s=5) as scorer:
        yield scorer


def assert_verdicts(scorer: MathScorer, pairs: list[Pair], least_share: float) -> None:
    verdicts = score_all(scorer, [pair.response for pair in pairs], [pair.truth for pair in pairs])
    assert not {verdict.status for verdict in verdicts} & {Status.TIMEOUT, Status.CRASHED}
    both = list(zip(verdicts, pairs, strict=True))
    assert [pair for verdict, pair in both if verdict.score and not pair.label] == []
    right = [verdict.score for verdict, pair in both if pair.label]
    assert sum(right) >= least_share * len(right)


def test_a_sample_of_every_kind(scorer: MathScorer) -> None:
    assert_verdicts(scorer, read_pairs(KINDS), least_share=1.0)


def test_siblings_of_public_reports(scorer: MathScorer) -> None:
    assert_verdicts(scorer, read_pairs(SIBLINGS), least_share=0.96)


def test_a_sample_of_the_classes(scorer: MathScorer) -> None:
    assert_verdicts(scorer, read_pairs(PAIRS)[::12], least_share=0.8)


#: Right answers by their labels that the rules refuse: no decimal is a third, and million multiplies.
REFUSED = {(r"\frac{1}{3}", r"\boxed{0.333333333}"), ("3", r"\boxed{3\text{ million}}")}


@pytest.mark.slow
def test_all_pairs_of_the_classes(scorer: MathScorer) -> None:
    """No right answer that math-verify alone accepts is lost, but by the rules."""
    assert_verdicts(scorer, read_pairs(PAIRS), least_share=0.85)
    pairs = read_pairs(PAIRS) + read_pairs(KINDS)
    with MathScorer(n_workers=2, time_limit_s=5, normalise=False) as plain:
        alone = score_all(plain, [pair.response for pair in pairs], [pair.truth for pair in pairs])
    right = [pair for verdict, pair in zip(alone, pairs, strict=True) if pair.label and verdict.score]
    lost = {(pair.truth, pair.response) for pair in right if not scorer.score(pair.response, pair.truth).score}
    assert lost <= REFUSED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"１２,\!０００", "12000"),
        (r"\textcolor{red}{\mathbf{7}}", "7"),
        (r"0.1\overline{6}", r"\frac{1}{6}"),
        (r"\sin 30^\circ", r"\sin(\frac{1}{6}\pi)"),
        ("2.5e-3", r"2.5 \cdot 10^{-3}"),
        ("x²≤½", r"x^{2} \le \frac{1}{2}"),
    ],
)
def test_one_spelling(text: str, expected: str) -> None:
    assert " ".join(cleaned(text).split()) == expected


@pytest.mark.parametrize(
    ("response", "answers"),
    [
        (r"\boxed{33}. Wait, it is \boxed{34}", ["34", "33, 34"]),
        (r"$x=\boxed{2}$ and $x=\boxed{3}$", ["2, 3"]),
        ("- \\boxed{2}\n- \\boxed{3}", ["2, 3"]),
        (r"\boxed{50}\%", [r"50\%"]),
        # Boxes of several cases are a list, boxes of two sentences are not.
        (r"If n is odd, \boxed{2}; if even, \boxed{3}.", ["2, 3"]),
        (r"For n=1, \boxed{2}, for n=2, \boxed{3}, for n=3, \boxed{4}", ["2, 3, 4"]),
        (r"if n=k: \boxed{2}; if n=m: \boxed{3}", ["2, 3"]),
        (r"\boxed{2}; otherwise, \boxed{3}", ["2, 3"]),
        ("First solution:\n\\boxed{2}\nSecond solution: \\boxed{3}", ["2, 3"]),
        (r"Part one is \boxed{2}; part two is \boxed{3}", ["2, 3"]),
        (r"x: \(\boxed{2}\), y: \(\boxed{3}\)", ["2, 3"]),
        (r"\boxed{2} when n is even, \boxed{3} when odd", ["2, 3"]),
        (r"\boxed{2} / \boxed{3}", ["2, 3"]),
        # Only if the first box is introduced as the second one is.
        (r"\boxed{2}, if we double it, \boxed{4}", ["4", "2, 4"]),
        (r"Area = \boxed{12}; for the final answer: \boxed{13}", ["13", "12, 13"]),
        (r"\boxed{3}, when rounded: \boxed{3.1}", ["3.1", "3, 3.1"]),
        (r"$x=\boxed{3}$ and for y, $\boxed{4}$", ["4", "3, 4"]),
        (r"The area is \boxed{2} and for the perimeter, \boxed{4}.", ["4", "2, 4"]),
        (r"The value is \boxed{2}, next value: \boxed{4}", ["4", "2, 4"]),
        ("| 1 | \\boxed{2} |\n| 2 | \\boxed{3} |", ["2, 3"]),
        (r"First answer: \boxed{2}; second answer: \boxed{3}", ["2, 3"]),
        (r"x: \boxed{2}, y: \boxed{3}", ["2, 3"]),
        (r"\boxed{2}. When we add them, \boxed{3}", ["3", "2, 3"]),
        ("综上所述，选C。", ["C。"]),
        ("正确选项是（C）", ["（C）"]),
        ("不选C", []),
        ("答えは5です。", ["5"]),
        (r"\text{Answer: } 5", ["5"]),
        ("The answer is 5. Then contradiction.", []),
        ("Suppose the answer is 5.", []),
        (r"<think>\boxed{5}</think> The answer is 6.", ["6."]),
        ("<answer>18</answer>", ["18"]),
        ("<answer>The answer is C</answer>", ["C", "The answer is C"]),
        ("<answer>3: 4</answer>", ["3: 4"]),
        ("### Final Answer\n\n(C)\n\nIt uses 2 steps.", ["(C)"]),
        ("**Answer**\nx = 1, y = 2", ["x = 1, y = 2"]),
        ("It is 5.\n#### 7", ["7"]),
        ("nothing to see", []),
        # An integer stated behind another one replaces it, and no other box.
        ("\\boxed{5}\nThe final answer is $7$.", ["$7$"]),
        (r"\boxed{1000}. The answer is 1,200.", ["1,200"]),
        (r"\boxed{1000}. The answer is 1,000.", ["1000"]),
        (r"\boxed{7}. The answer is 7.07.", ["7"]),
        ("\\boxed{B}\n\nThe answer is 3.", ["B"]),
        ("\\boxed{5\\sqrt{2}}\n\nThe final answer is 7.07.", [r"5\sqrt{2}"]),
        (r"\boxed{\frac13}. So the answer is 0.33.", [r"\frac13"]),
        (r"\boxed{10\text{ million}}. The answer is 10.", [r"10\text{ million}"]),
        (r"\boxed{50\%}. The answer is 50.", [r"50\%"]),
        (r"$\boxed{50}\%$. The answer is 50.", [r"50\%"]),
        (r"\boxed{42_{8}}. The final answer is 42.", ["42_{8}"]),
        (r"\boxed{(3,4)}. The answer is 5.", ["(3,4)"]),
        (r"\boxed{3}, \boxed{4}. The answer is 5.", ["3, 4"]),
        ("\\boxed{\\text{No}}\n\nThe final answer is $0$.", [r"\text{No}"]),
        # A denial is a sentence with a verb, which ends behind it.
        (r"\boxed{3} is wrong.", []),
        (r"\boxed{3} isn't right", []),
        ("$\\boxed{3}$ cannot be correct.\nSo I give up.", []),
        (r"\boxed{\frac12} is wrong. The answer is $\frac13$.", [r"$\frac13$"]),
        (r"\boxed{3} is not correct if n is even, but here n is odd.", ["3"]),
        (r"$\boxed{7}$, false", ["7"]),
        (r"\boxed{A} is false, so it is the one.", ["A"]),
        (r"\boxed{100} is wrong-looking but right.", ["100"]),
        (r"\boxed{12} cannot be the answer unless n is even, and it is.", ["12"]),
    ],
)
def test_where_the_answer_is(response: str, answers: list[str]) -> None:
    assert answer_texts(response).texts == answers


@pytest.mark.parametrize("table", ["_SPELLINGS", "_NUMBERS"])
def test_every_rule_of_spelling_makes_its_example_equal(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = getattr(spelling, table)
    for rule in rules:
        answer, truth = rule[2].split(" || ")
        monkeypatch.setattr(spelling, table, rules)
        assert judging.judge(f"\\boxed{{{answer}}}", truth, True) is Status.CORRECT, rule
        monkeypatch.setattr(spelling, table, tuple(other for other in rules if other is not rule))
        assert judging.judge(f"\\boxed{{{answer}}}", truth, True) is not Status.CORRECT, rule


@pytest.mark.parametrize(("table", "verdict"), [("REFUSALS", Status.WRONG), ("ACCEPTANCES", Status.CORRECT)])
def test_every_rule_of_judging_decides_its_example(
    table: str, verdict: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = getattr(judging, table)
    for rule in rules:
        monkeypatch.setattr(judging, table, rules[::-1])
        assert judging.judge(rule.response, rule.truth, True) is verdict, rule
        monkeypatch.setattr(judging, table, tuple(other for other in rules if other is not rule))
        assert judging.judge(rule.response, rule.truth, True) is not verdict, rule


def test_a_part_that_is_not_read_is_no_answer_and_no_truth(scorer: MathScorer) -> None:
    assert scorer.score(r"\boxed{5 \text{ of } 6}", "5").status is Status.PARSE_FAILED
    assert scorer.score(r"\boxed{5}", r"5 \text{ of } 6").status is Status.BAD_TRUTH
    assert scorer.score(r"\boxed{5\text{ of }6}", r"5 \text{ of } 6").status is Status.CORRECT


@pytest.mark.parametrize(
    ("response", "accepted"),
    [("It is 10%", True), (r"It is 10\%.", True), ("It is 0.1", True), (r"It is 0.1\%", False), ("0.1 percent", False)],
)
def test_a_percent_sign_after_a_bare_number_counts(scorer: MathScorer, response: str, accepted: bool) -> None:
    assert (scorer.score(response, r"10\%").status is Status.CORRECT) is accepted


@pytest.mark.parametrize(
    "response",
    [
        "There are 5 cats.",
        "Step 5: 2 + 3 = 5",
        "By Theorem 2, the count is 5.",
        "The answer is 5 by Theorem 3.",
        "The answer is 5 (see section 3).",
        "The answer is 5, as shown in figure 2.",
        "The answer is $5$ by equation (3).",
        "It is 5 by Theorem 2 and Lemma 3.",
        "As 7 > 6, the value is 5.",
        "How many cats are there? There are 5.",
        "How many of them are less than 12? There are 5.",
        "<answer>The answer is 5</answer>",
        "<answer>5 is the answer</answer>",
        "<answer>Tom has 12 and the total is 5</answer>",
        "I guessed wrong before. The answer is 5.",
        "Suppose there are x cats. Then x = 5.",
        "The answer is 5. This is not surprising.",
        r"\boxed{5}",
    ],
)
def test_a_number_that_a_sentence_gives_is_the_answer(scorer: MathScorer, response: str) -> None:
    assert scorer.score(response, "5").status is Status.CORRECT


@pytest.mark.parametrize(
    "response",
    [
        "I guess 5.",
        "Is it 5?",
        "It could be 5.",
        "Answer: 5 (just a guess)",
        "By Theorem 5 we are done.",
        "By Theorem 2 and Lemma 5 we are done.",
        "By Theorem 5 and Lemma 2 we are done.",
        "The answer is 3 by Theorem 5.",
        "Therefore x > 5.",
        "The answer exceeds 5.",
        "A number such as 5.",
        "It is 5. This is wrong.",
        "Let x = 5. This leads to a contradiction.",
        "Suppose it is 5.",
        "The answer is 5, or rather 6.",
        "The answer used to be 5.",
        "The answer ends in 5.",
        "The answer is two times 5.",
        "5 < x",
        "5 or higher",
        "So x <= 5",
        r"La respuesta es \ge 5.",
        "### Final Answer\n\n12\n\nIt uses 5 steps.",
        "<answer>The answer is $2x=5$.</answer>",
        "Die Lösung ist nicht 5.",
        "La respuesta no es 5.",
        "Ответ не 5.",
        r"\boxed{5\text{, I think}}",
        r"\boxed{5\text{ (not sure)}}",
        r"\boxed{5\text{ could be right}}",
    ],
)
def test_a_guess_a_denial_and_a_reference_give_no_answer(scorer: MathScorer, response: str) -> None:
    assert scorer.score(response, "5").status is not Status.CORRECT


@pytest.mark.parametrize(
    ("answer", "truth", "accepted"),
    [
        (r"AB^2=25", "25", True),
        (r"a_1+a_2=25", "25", True),
        (r"x_1+x_2=25", "25", False),
        (r"m-n=25", "25", True),
        (r"PA \cdot PB=25", "25", True),
        (r"\alpha+\beta=25", "25", True),
        (r"[ABC]=25", "25", True),
        (r"x-y=25", "25", False),
        (r"(A), (C)", "A and C", True),
        (r"(A), (B)", "A and C", False),
        (r"x\in]1,2]", "(1,2]", True),
        (r"]1,2]", "[1,2]", False),
        (r"\mathbb{R}-\{0\}", r"(-\infty,0)\cup(0,\infty)", True),
        (r"\text{on Friday}", "Friday", True),
        (r"(\text{E})", "E", True),
        (r"(1101)_2", "1101_2", True),
        (r"(1101)_2", "1101_3", False),
        ("3:00", "1:00", False),
        ("6:4", "3:2", True),
        (r"\left\{\begin{array}{l}x=2\\y=-1\end{array}\right.", "x=2,y=-1", True),
        (r"\begin{cases}x&=2\\y&=-1\end{cases}", "(2,-1)", True),
        (r"\begin{cases}x=-1\\y=2\end{cases}", "x=2,y=-1", False),
        (r"\begin{cases}x,x<0\\-x,x>0\end{cases}", r"\begin{cases}-x,x<0\\x,x>0\end{cases}", False),
        ("2{,}5", "2.5", True),
        (r"\begin{pmatrix}1&-2\end{pmatrix}^T", r"\begin{pmatrix}1\\-2\end{pmatrix}", True),
        (r"[1,-2]^T", r"\begin{pmatrix}1\\-2\end{pmatrix}", True),
        (r"\begin{pmatrix}1&-2\end{pmatrix}", r"\begin{pmatrix}1\\-2\end{pmatrix}", False),
        ("y=3x-2", "f(x)=3x-2", True),
        ("x=3y-2", "f(x)=3x-2", False),
        (r"C_{n+1}^3", r"\binom{n+1}{3}", True),
        (r"2mg/k", r"\frac{2mg}{k}", True),
        (r"\frac{mg}{k}", r"\frac{2mg}{k}", False),
        ("5 km/h", "5", True),
        (r"\text{Ann is the winner}", r"\text{Ann}", True),
        (r"\text{not possible}", "impossible", True),
        (r"\text{not possible}", "possible", False),
        # A difference or a product names a value in an answer; in a truth only one of lengths or measures does.
        ("7=m-n", "7", True),
        (r"m-n\approx 7", "7", True),
        ("7=m-x", "7", False),
        ("6", "2p-3q=6", False),
        ("6", "6=2p-3q", False),
        ("2", "2a-b=2", False),
        ("0", "a-2b=0", False),
        ("0", "a+b-c=0", False),
        ("1", "R-r=1", False),
        ("1", r"p\cdot q-r=1", False),
        ("4p-6q=12", "2p-3q=6", True),
        ("m-n=7", "m-n=7", True),
        ("5", "AB-CD=5", True),
        ("5", "|A|-|B|=5", True),
        ("2,4", r"\begin{cases}a-b=2\\a+b=4\end{cases}", False),
        ("\\begin{cases}\nx=2\\\\\ny=-1\n\\end{cases}", "x=2,y=-1", True),
        ("x=2,y=-1", "\\begin{cases}\nx=2\\\\\ny=-1\n\\end{cases}", True),
        (r"(\sin(1),2)^T", r"\begin{pmatrix}\sin(1)\\2\end{pmatrix}", True),
        (r"(-(1+\sqrt2),2)^T", r"(-1-\sqrt2,2)", True),
        ("((1),2)^T", "(1,2)", True),
        ("5 km (approximately)", "5", True),
        ("12 cm (approx.)", r"12\text{ cm}", True),
        ("5 kg (exactly)", r"5\text{ g}", False),
        ("3 mg(a+b)", "3", False),
        ("2{,}500", "2500", True),
        ("2.500", "2{,}500", False),
        ("1{,}000", "1.000", False),
        (r"3\text{ to }5", "6:10", True),
        ("1:2:3", "1 to 2 to 3", True),
        ("2 to 3 hours", r"\frac23", False),
        ("2 to 3", r"\frac23", False),
        ("10 to 1", "10", False),
        (r"\text{Bob is the answer}", r"\text{Bob}", True),
        (r"\text{Bob is a winner}", r"\text{Bob}", True),
        (r"\text{Bob is a function}", r"\text{Bob}", False),
        ("xy=2", r"y=\frac{2}{x}", True),
        ("m+m=5", "5", False),
        (r"m+n=5\text{ or }m+n=7", "5, 7", True),
        (r"x^2\in[0,5]", "[0,5]", False),
        (r"\begin{vmatrix}2&1\\1&3\end{vmatrix}", "5", True),
        (r"1<x<3, x\neq 2", r"(1,2)\cup(2,3)", True),
        (r"x>-2, x\le 3", "(-2,3]", True),
        (r"x<1, x>2", r"(-\infty,1)\cup(2,\infty)", True),
        (r"x>1, x>2", r"(1,\infty)", False),
        ("b<0, a>0", "a>0, b<0", True),
        ("a<0, b>0", "a>0, b<0", False),
        (r"\text{No, such a set does not exist}", "No", True),
        (r"\text{No, but yes}", "Yes", False),
        (r"\text{No}", r"\text{No, but yes}", False),
        (r"\text{No. of solutions is infinite}", "No", False),
        (r"\text{Yes, the second player wins}", "Yes", True),
        (r"\text{Yes, the second player wins}", r"\text{Yes, the first player wins}", False),
        # A family is the same one by another letter and from another member, if the letter has a domain.
        (r"5n-3, n\in\mathbb{Z}", r"5k+2, k\in\mathbb{Z}", True),
        (r"5n-2, n\in\mathbb{Z}", r"5k+2, k\in\mathbb{Z}", False),
        (r"10n-3, n\in\mathbb{Z}", r"5k+2, k\in\mathbb{Z}", False),
        (r"2-5n, n\in\mathbb{Z}", r"5k+2, k\in\mathbb{Z}", True),
        (r"5n-3, n\in\mathbb{N}", r"5k+2, k\in\mathbb{N}", False),
        (r"\frac{\pi}{3}-k\pi", r"-\frac{2\pi}{3}+k\pi, k\in\mathbb{Z}", True),
        (r"(s,2s), s\in\mathbb{R}", r"(t,2t), t\in\mathbb{R}", True),
        (r"(s,3s), s\in\mathbb{R}", r"(t,2t), t\in\mathbb{R}", False),
        (r"(n-2)\pi", r"n\pi", False),
        # A shift of the letter leaves no other pair, interval, function or sequence the same, and no part of Z.
        (r"(k,k), k\in\mathbb{Z}", r"(k,-k), k\in\mathbb{Z}", False),
        (r"[2n\pi,2n\pi+3\pi], n\in\mathbb{Z}", r"[2k\pi,2k\pi+\pi], k\in\mathbb{Z}", False),
        (r"[2n\pi,(2n+1)\pi], n\in\mathbb{Z}", r"[2k\pi,2k\pi+\pi], k\in\mathbb{Z}", True),
        (r"x=2k, y=-3k, k\in\mathbb{Z}", r"x=2k, y=3k, k\in\mathbb{Z}", False),
        (r"f(n)=2n+2, n\in\mathbb{Z}", r"f(n)=2n, n\in\mathbb{Z}", False),
        (r"a_n=2n-1, n\in\mathbb{Z}", r"a_n=2n+1, n\in\mathbb{Z}", False),
        (r"n-1, n\in\mathbb{Z}", r"n+1, n\in\mathbb{Z}", False),
        ("2n-1", r"2n+1, n\in\mathbb{Z}", False),
        (r"2k-1, k\in\mathbb{Z}^+", r"2k+1, k\in\mathbb{Z}^+", False),
        (r"3k-2, k\in\mathbb{Z}, k\ge 0", r"3k+1, k\in\mathbb{Z}, k\ge 0", False),
        (
            r"x=\frac{\pi}{6}+2n\pi\text{ or }x=\frac{17\pi}{6}+2n\pi, n\in\mathbb{Z}",
            r"x=\frac{\pi}{6}+2k\pi\text{ or }x=\frac{5\pi}{6}+2k\pi, k\in\mathbb{Z}",
            True,
        ),
        # Inequalities about two names are no set of numbers.
        ("a>2, b>1", "a>1, b>2", False),
        (r"a<0\text{ and }b>0", r"a>0\text{ and }b<0", False),
        ("x>1, y>1", r"(1,\infty)", False),
        ("b>2, a>1", "a>1, b>2", True),
        ("R", "r", False),
        (r"-1,1,-1,\ldots", r"1,-1,1,\ldots", False),
        (r"n\not\equiv 2\pmod{4}", r"n\not\equiv 2 \pmod 4", True),
        (r"n\equiv 2\pmod 4", r"n\not\equiv 2 \pmod 4", False),
        (r"x\notin\mathbb{Q}", r"x\not\in \mathbb{Q}", True),
        # Roman i and j are unit vectors, roman i and i are not.
        (r"2\mathrm{i}-3\mathrm{i}", "-i", True),
        (r"z=\mathrm{i}\text{ or }z=-\mathrm{i}", r"\pm i", True),
        (r"3\mathrm{i}+2\mathrm{j}", "(3,2)", True),
        (r"3\mathbf{i}+2\mathbf{j}+2\mathbf{i}", "(2,2)", False),
        (r"70^\text{o}", r"\angle A=70^{o}", True),
        (r"45^{\degree}", r"45^{\mathrm{o}}", True),
        (r"\frac{\sqrt 21}{3}", r"\sqrt{21}/3", True),
        ("λ=3", "3", True),
        ("180°−2α", r"180^\circ-2\alpha", True),
        ("१२", "12", True),
        ("1, 2", r"1\quador\quad2", True),
        (r"50\text{ cm}", r"5\text{ dm}", True),
        (r"5\text{ cm}", r"5\text{ decimeters}", False),
        (r"6 dm^2", r"600\text{ cm}^2", True),
        (r"500\text{ ml}", r"5\text{ dl}", True),
        (r"25\text{ cl}", r"0.25\text{ liters}", True),
        (r"25\text{ ml}", r"25\text{ centiliters}", False),
        (r"5\ \mu\text{m}", r"5\text{ microns}", True),
        (r"5\ \mu\text{m}", r"0.005\text{ mm}", True),
        (r"6\text{ pints}", r"3\text{ quarts}", True),
        (r"3\text{ quarts}", r"3\text{ gallons}", False),
        (r"16\text{ cups}", r"1\text{ gallon}", True),
        (r"60\text{ mph}", r"60\text{ kph}", False),
        (r"10\text{ m/s}", r"36\text{ kmh}", True),
        (r"\$0.50", r"5\text{ dimes}", True),
        (r"3\text{ dimes}", r"3\text{ nickels}", False),
        (r"3\text{ Wh}", r"3\text{ kwh}", False),
        (r"3000\text{ mA}", r"3\text{ A}", True),
        (r"3\text{ V}", r"3\text{ A}", False),
        (r"25\text{ C}", r"25\text{ degrees C}", True),
        (r"25\text{ degrees Fahrenheit}", r"25\text{ degrees Celsius}", False),
        (r"25^\circ C", r"25\text{ degrees Celsius}", True),
        (r"25\text{ degrees Celsius}", r"25^\circ", True),
        (r"2\pi k\text{ for all integers }k", r"2\pi k, k\in\mathbb{Z}", True),
        (r"f(x)=cx\text{ for any real }c", r"f(x)=cx, c\in\mathbb{R}", True),
        (r"(3t,4t)\text{ where }t\in\mathbb{Z}", r"(3t,4t), t\in\mathbb{Z}", True),
        (r"k\pi, 2k\pi, k\in\mathbb{Z}", r"k\pi", False),
        # A region and a range of a named thing, and approximate values in words.
        (r"z\in\mathbb{C}", r"\mathbb{C}", True),
        (r"x\in A\setminus B", r"A\setminus B", True),
        (r"a+b\in[1,2]", "[1,2]", True),
        (r"a-b=\pm 3", "3,-3", True),
        (r"x\text{ is approximately }3.46", "3.46", True),
        (r"\text{Length }=\text{ about }346\text{ m}", "346", True),
        (r"x=40\text{ is the maximum value}", "40", True),
        (r"x+1=5\text{ is the answer}", "5", False),
        (r"\text{Roots: }2,3", "2,3", True),
        ("3,2", r"\text{max: }3, 2", True),
        (r"\text{fifty percent}", "0.5", True),
        (r"12\%", r"\text{twelve percent}", True),
        # Of letters behind a choice none is another choice; a unit belongs to the value of a name.
        ("C) and D)", "C", False),
        (r"(C),\ 12", "C", True),
        (r"m+n=35\%", "0.35", True),
        (r"a-b=12\text{ m}", r"12\text{ cm}", False),
        # A chain of equations is between its first name and its last side.
        ("6", r"S=\frac12 ab=6", True),
        ("x=5", "x=2+3=5", True),
        (r"f(x)=(x+1)^2-2x=x^2+1", "x^2+1", True),
        ("a+b=2+3=5", "a+b=5", True),
        (r"2x+1=11=5", "5", False),
        (r"\text{The answer is }y=2x+1", "y=2x+1", True),
        (r"\text{The answer is }|x|=5", "5", False),
        # A sum of letters in a truth asks for a number, and is not a name of other letters.
        (r"\frac{\pi}{4}", r"\alpha+\beta=\frac{\pi}{4}", True),
        ("5", "100m+n=5", True),
        ("5", "2x+y=5", False),
        ("z", "x+y=z", False),
        (r"\frac{a}{b}", r"\frac{AB}{CD}=\frac{a}{b}", True),
    ],
)
def test_notations_of_models_and_of_public_truths(scorer: MathScorer, answer: str, truth: str, accepted: bool) -> None:
    assert (scorer.score(f"\\boxed{{{answer}}}", truth).status is Status.CORRECT) is accepted


def test_the_last_formula_of_a_text_is_read(scorer: MathScorer) -> None:
    assert scorer.score(r"Hence $-2 \le x \le 7$.", r"x \in [-2,7]").status is Status.CORRECT
    assert scorer.score(r"It is $1-\frac{1}{\mathrm{e}}$.", r"1-\frac{1}{e}").status is Status.CORRECT
    assert scorer.score(r"Hence $m<0 \text{ or } m>7$.", r"(-\infty,0)\cup(7,\infty)").status is Status.CORRECT
    assert scorer.score(r"Hence $m>0 \text{ or } m<7$.", "(0,7)").status is Status.WRONG
    assert scorer.score("Hence\n$$\nf(x) = x^2+a\n$$", "x^2+a").status is Status.CORRECT


def test_without_normalisation_the_verdict_is_math_verifys(scorer: MathScorer) -> None:
    with MathScorer(n_workers=1, normalise=False) as plain:
        for response, truth in ((r"\boxed{2x=5}", "5"), (r"\boxed{1.41421356}", r"\sqrt{2}")):
            assert plain.score(response, truth).status is Status.CORRECT
            assert scorer.score(response, truth).status is Status.WRONG


def test_equal_answers_in_flight_are_judged_once(scorer: MathScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[str] = []
    run, began, go_on = scorer._pool.run, threading.Event(), threading.Event()

    def slow(response: str, truth: str, normalise: bool) -> Status:
        tasks.append(response)
        began.set()
        go_on.wait(60)
        return run(response, truth, normalise)

    monkeypatch.setattr(scorer._pool, "run", slow)
    verdicts: list[Status] = []
    score = lambda: verdicts.append(scorer.score(r"\boxed{\sqrt{8}+z}", r"2\sqrt{2}+z").status)  # noqa: E731
    threads = [threading.Thread(target=score) for _ in range(4)]
    threads[0].start()
    assert began.wait(60)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(tasks) == 1
    assert verdicts == [Status.CORRECT] * 4


def test_the_table_counts_by_kind() -> None:
    pairs = [Pair("one", "2", r"\boxed{2}", True), Pair("one", "5", r"\boxed{2x=5}", False)]
    assert "| one | 1 / 1 | 1 / 0 | 1 / 1 |" in unpadded(table(pairs, beside=False))


@pytest.mark.slow
def test_a_load_with_pathological_responses_keeps_every_verdict() -> None:
    assert "differ from those alone: 0" in load(60)
