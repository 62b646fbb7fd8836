"""Files, shell, data and the web."""

from __future__ import annotations

from leadline.eval.tasks.tools.blueprint import DONE, tool
from leadline.eval.tasks.values import (
    CITY,
    COMMAND,
    EMAIL,
    OUTPUT,
    PATH,
    PERSON,
    PHRASE,
    STATE,
    TOPIC,
    URL,
    WORD,
    Value,
    integer,
    listing,
    one_of,
    switch,
)


def _evaluate(expression: str) -> float:
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[operator]


COMPUTER = (
    tool(
        "read_file|open_file|cat|get_file",
        "Read a file and return its content",
        {"path|file|filename|file_path": PATH},
        ("Read {path}.", "What is in {path}?", "Show me the file {path}.", "Open {path}, please."),
        {"text": PHRASE},
        "The file says: {text}",
    ),
    tool(
        "write_file|save_file|create_file",
        "Write text to a file",
        {"path|file|filename": PATH, "content|text|contents": PHRASE},
        (
            "Write {content} to {path}.",
            "Save {content} in the file {path}.",
            "Create {path} with the content {content}.",
        ),
        DONE,
        "I wrote it to {path}.",
        append=(switch(), ", at the end of what is there"),
    ),
    tool(
        "list_files|ls|list_directory",
        "List the files in a folder",
        {"path|folder|directory": one_of("src", "docs", "data", "tests", "home", "logs", "lib")},
        (
            "List the files in {path}{+}.",
            "Which files are in {path}{+}?",
            "What is in the folder {path}{+}?",
        ),
        {"files": listing(PATH, 1, 4)},
        "The files are {files}.",
        recursive=(switch(), " and all folders below"),
    ),
    tool(
        "delete_file|remove_file",
        "Delete a file",
        {"path|file": PATH},
        ("Delete {path}.", "Remove the file {path}.", "Please delete the file {path}."),
        DONE,
        "I deleted {path}.",
    ),
    tool(
        "run_command|bash|shell|execute",
        "Run a shell command and return its output",
        {"command|cmd": COMMAND},
        ("Run {command}.", "Execute {command}{+}.", "Run the command {command}{+}."),
        {"text": OUTPUT},
        "The output is: {text}",
        timeout=(integer(5, 300), " with a timeout of {} seconds"),
    ),
    tool(
        "apply_patch|edit_file|replace_in_file",
        "Replace a text in a file",
        {"path|file": PATH, "old|search": WORD, "new|replace": WORD},
        ("Replace {old} with {new} in {path}.", "In {path}, change {old} to {new}{+}."),
        {"changes": integer(1, 20)},
        "I made {changes} changes in {path}.",
        all=(switch(), " everywhere"),
    ),
    tool(
        "grep|search_files|find_in_files",
        "Search files for a text",
        {"pattern|text|query": WORD, "path|folder": one_of("src", "docs", "data", "tests", "lib")},
        (
            "Where is {pattern} in {path}?",
            "Search {path} for {pattern}.",
            "Grep {pattern} in {path}.",
        ),
        {"file": PATH, "line": integer(1, 900)},
        "It is in {file}, line {line}.",
    ),
    tool(
        "http_get|fetch_url|fetch|get_url",
        "Fetch a web page",
        {"url|address": URL},
        ("Fetch {url}.", "What is on {url}?", "Get the page {url}."),
        {"text": PHRASE},
        "The page says: {text}",
    ),
    tool(
        "search|web_search|search_web|find",
        "Search the web",
        {"query|q": TOPIC},
        (
            "Search for {query}{+}.",
            "Find something about {query}{+}.",
            "Look up {query} on the web{+}.",
            "Please do a search for {query}{+}.",
        ),
        {"text": PHRASE},
        "I found this: {text}",
        limit=(integer(1, 20), ", at most {} results"),
    ),
    tool(
        "query_database|run_sql|sql_query",
        "Run an SQL query",
        {
            "query|sql": Value(
                {"type": "string"},
                lambda rng: (
                    f"SELECT {rng.choice(('name', 'id', 'price', '*'))} FROM "
                    f"{rng.choice(('users', 'orders', 'items', 'rooms', 'events'))} "
                    f"WHERE id = {rng.randint(1, 999)}"
                ),
                lambda value: f'"{value}"',
                "The SQL statement",
            )
        },
        ("Run the query {query}.", "Execute {query} on the database."),
        {"rows": integer(0, 99), "first": WORD},
        "There are {rows} rows; the first is {first}.",
    ),
    tool(
        "get_user|fetch_user|user_info",
        "Get a user's record by id",
        {"user_id|id|user": integer(1, 9999)},
        ("Who is user {user_id}?", "Get user {user_id}.", "Show me the record of user {user_id}."),
        {"name": PERSON, "city": CITY},
        "User {user_id} is {name} from {city}.",
    ),
    tool(
        "create_user|add_user|register_user",
        "Create a user",
        {"name": PERSON, "email": EMAIL, "role": one_of("admin", "editor", "viewer")},
        ("Create the user {name} with {email} as {role}.", "Add {name}, {email}, role {role}."),
        {"user_id": integer(1, 9999)},
        "The user has the id {user_id}.",
    ),
    tool(
        "list_users|get_users|all_users",
        "List all users",
        {},
        ("Which users are there?", "List all users.", "Show me the users."),
        {"users": listing(PERSON, 1, 4)},
        "The users are {users}.",
    ),
    tool(
        "get_status|status|health_check",
        "Get the state of the server",
        {},
        ("Is the server up?", "How is the server doing?", "Check the server."),
        {"status": STATE, "uptime_hours": integer(1, 999)},
        "The server is {status} and runs for {uptime_hours} hours.",
    ),
    tool(
        "add|sum|add_numbers",
        "Add two numbers",
        {"a|x|first": integer(1, 9999), "b|y|second": integer(1, 9999)},
        ("What is {a} plus {b}?", "Add {a} and {b}.", "Add {b} to {a}.", "What is {a} + {b}?"),
        {"result": lambda given: given["a"] + given["b"]},
        "The result is {result}.",
    ),
    tool(
        "multiply|product",
        "Multiply two numbers",
        {"a|x": integer(2, 999), "b|y": integer(2, 999)},
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?"),
        {"result": lambda given: given["a"] * given["b"]},
        "The result is {result}.",
    ),
    tool(
        "calculate|calculator|evaluate",
        "Evaluate an arithmetic expression",
        {
            "expression": Value(
                {"type": "string"},
                lambda rng: f"{rng.randint(2, 999)} {rng.choice('+-*/')} {rng.randint(2, 99)}",
                description="The expression, such as 2 + 3",
            )
        },
        ("Calculate {expression}.", "Work out {expression} for me.", "Evaluate {expression}."),
        {"result": lambda given: _evaluate(given["expression"])},
        "The result is {result}.",
    ),
    tool(
        "count_words|word_count",
        "Count the words of a text",
        {"text": PHRASE},
        ("How many words are in {text}?", "Count the words of {text}."),
        {"words": lambda given: len(given["text"].split())},
        "There are {words} words.",
    ),
    tool(
        "random_number|roll|get_random",
        "Draw a random number",
        {"min|low": integer(0, 10), "max|high": integer(11, 1000)},
        ("Give me a random number between {min} and {max}.", "Pick a number from {min} to {max}."),
        {"number": integer(0, 1000)},
        "The number is {number}.",
    ),
    tool(
        "roll_dice|dice",
        "Roll dice",
        {"count|n": integer(1, 6), "sides": integer(4, 20)},
        ("Roll {count} dice with {sides} sides.", "Roll {count} dice of {sides} sides each."),
        {"total": integer(1, 120)},
        "The total is {total}.",
    ),
)
