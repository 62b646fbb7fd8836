"""Tools written by hand: what they take, how people ask for them, what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from leadline.eval.tasks.values import (
    ANIMAL,
    CITY,
    CODE,
    COLOUR,
    COMMAND,
    COUNTRY,
    CURRENCY,
    DATE,
    DAY,
    EMAIL,
    FOOD,
    LANGUAGE,
    ORDER,
    OUTPUT,
    PATH,
    PERSON,
    PHRASE,
    ROOM,
    STATE,
    THING,
    TIME,
    TIMEZONE,
    TOPIC,
    URL,
    WEATHER,
    WORD,
    Value,
    decimal,
    integer,
    listing,
    one_of,
    record,
    switch,
)

Field: TypeAlias = Value | Callable[[Mapping[str, Any]], Any]
"""Of a result: drawn, or worked out from the arguments."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A tool before its names are settled.

    Attributes:
        names: names that it may have.
        description: for its schema.
        required: arguments; a key holds the names that one may have, ``city|location``, and the
            templates use the first.
        optional: arguments that a request may name, each with the words that do so.
        asks: requests; ``{+}`` is where optional arguments are named.
        result: fields of the JSON result; a single field ``text`` is a result in plain text.
        answer: what to say then; empty is what results without words of their own get.
    """

    names: tuple[str, ...]
    description: str
    required: Mapping[str, Value]
    optional: Mapping[str, tuple[Value, str]]
    asks: tuple[str, ...]
    result: Mapping[str, Field]
    answer: str

    @property
    def has_one_plain_argument(self) -> bool:
        """Whether its one required argument is no list: several calls can then be asked at once."""
        types = [value.schema["type"] for value in self.required.values()]
        return len(types) == 1 and types != ["array"]


def _tool(
    names: str,
    description: str,
    required: Mapping[str, Value],
    asks: tuple[str, ...],
    result: Mapping[str, Field],
    answer: str = "",
    **optional: tuple[Value, str],
) -> Blueprint:
    return Blueprint(tuple(names.split("|")), description, required, optional, asks, result, answer)


def _evaluate(expression: str) -> float:
    left, operator, right = expression.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[operator]


_DONE: dict[str, Field] = {"status": one_of("ok")}

BLUEPRINTS = (
    _tool(
        "get_weather|get_current_weather|weather|fetch_weather",
        "Get the current weather for a city",
        {"city|location|place": CITY},
        (
            "What is the weather in {city}{+}?",
            "How is the weather in {city}{+}?",
            "What's the weather like in {city}{+}?",
            "Weather in {city}{+}?",
        ),
        {"temperature": integer(-10, 38), "condition": WEATHER},
        "It is {temperature} degrees and {condition} in {city}.",
        unit=(one_of("celsius", "fahrenheit"), " in {}"),
    ),
    _tool(
        "get_forecast|weather_forecast",
        "Get the weather forecast for a city",
        {"city|location": CITY, "days|num_days": integer(1, 10)},
        (
            "Give me the forecast for {city} for {days} days.",
            "What will the weather be in {city} over the next {days} days?",
        ),
        {"forecast": WEATHER, "high": integer(10, 38), "low": integer(-10, 9)},
        "It will be {forecast} in {city}, {low} to {high} degrees.",
    ),
    _tool(
        "get_time|current_time|time_in",
        "Get the current time in a timezone",
        {"timezone|tz|zone": TIMEZONE},
        ("What time is it in {timezone}?", "Tell me the time in {timezone}."),
        {"time": TIME},
        "It is {time} in {timezone}.",
    ),
    _tool(
        "add|sum|add_numbers",
        "Add two numbers",
        {"a|x|first": integer(1, 9999), "b|y|second": integer(1, 9999)},
        ("What is {a} plus {b}?", "Add {a} and {b}.", "Add {b} to {a}.", "What is {a} + {b}?"),
        {"result": lambda given: given["a"] + given["b"]},
        "The result is {result}.",
    ),
    _tool(
        "multiply|product",
        "Multiply two numbers",
        {"a|x": integer(2, 999), "b|y": integer(2, 999)},
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?"),
        {"result": lambda given: given["a"] * given["b"]},
        "The result is {result}.",
    ),
    _tool(
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
    _tool(
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
    _tool(
        "read_file|open_file|cat|get_file",
        "Read a file and return its content",
        {"path|file|filename|file_path": PATH},
        ("Read {path}.", "What is in {path}?", "Show me the file {path}.", "Open {path}, please."),
        {"text": PHRASE},
        "The file says: {text}",
    ),
    _tool(
        "write_file|save_file|create_file",
        "Write text to a file",
        {"path|file|filename": PATH, "content|text|contents": PHRASE},
        (
            "Write {content} to {path}.",
            "Save {content} in the file {path}.",
            "Create {path} with the content {content}.",
        ),
        _DONE,
        "I wrote it to {path}.",
        append=(switch(), ", at the end of what is there"),
    ),
    _tool(
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
    _tool(
        "delete_file|remove_file",
        "Delete a file",
        {"path|file": PATH},
        ("Delete {path}.", "Remove the file {path}.", "Please delete the file {path}."),
        _DONE,
        "I deleted {path}.",
    ),
    _tool(
        "run_command|bash|shell|execute",
        "Run a shell command and return its output",
        {"command|cmd": COMMAND},
        ("Run {command}.", "Execute {command}{+}.", "Run the command {command}{+}."),
        {"text": OUTPUT},
        "The output is: {text}",
        timeout=(integer(5, 300), " with a timeout of {} seconds"),
    ),
    _tool(
        "send_email|email|mail",
        "Send an e-mail",
        {"to|recipient": EMAIL, "subject": PHRASE},
        (
            "Send an e-mail to {to} with the subject {subject}.",
            "Mail {to}, subject {subject}.",
            "Write to {to} about {subject}.",
        ),
        {"id": CODE},
        "I sent the e-mail to {to}.",
    ),
    _tool(
        "send_message|message|text_person",
        "Send a message to a person",
        {"to|person|recipient": PERSON, "text|message|body": PHRASE},
        ("Tell {to} {text}.", "Send {text} to {to}.", "Send {to} the message {text}."),
        _DONE,
        "I sent the message to {to}.",
    ),
    _tool(
        "create_event|add_event|new_event|schedule_event",
        "Create an event in the calendar",
        {"title|name": PHRASE, "date|day": DATE, "time|start": TIME},
        (
            "Put {title} into my calendar on {date} at {time}.",
            "Create an event {title} on {date} at {time}{+}.",
            "Add {title} to the calendar for {date}, {time}.",
        ),
        {"id": CODE},
        "The event is in your calendar with id {id}.",
        attendees=(listing(PERSON, 1, 3), " with {}"),
    ),
    _tool(
        "list_events|get_events|get_calendar",
        "List the events of a day",
        {"date|day": DATE},
        (
            "What is on my calendar on {date}?",
            "Do I have events on {date}?",
            "List my events on {date}.",
        ),
        {"events": listing(PHRASE, 1, 2)},
        "On {date}: {events}.",
    ),
    _tool(
        "set_alarm|alarm",
        "Set an alarm",
        {"time|at": TIME},
        ("Set an alarm for {time}{+}.", "Wake me at {time}{+}."),
        _DONE,
        "The alarm is set for {time}.",
        day=(DAY, " on {}"),
    ),
    _tool(
        "set_timer|timer|start_timer",
        "Start a timer",
        {"minutes|duration": integer(1, 90)},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
        _DONE,
        "The timer runs for {minutes} minutes.",
    ),
    _tool(
        "create_reminder|remind|add_reminder",
        "Remind the user of something",
        {"text|what|message": PHRASE, "time|at": TIME},
        ("Remind me at {time}: {text}.", "Create a reminder {text} for {time}."),
        {"id": CODE},
        "I will remind you at {time}.",
    ),
    _tool(
        "translate|translate_text",
        "Translate a text to another language",
        {"text": PHRASE, "language|target|target_language": LANGUAGE},
        (
            "Translate {text} to {language}.",
            "How do you say {text} in {language}?",
            "What is {text} in {language}?",
        ),
        {"translation": WORD},
        "In {language} it is: {translation}",
    ),
    _tool(
        "convert_currency|exchange|currency",
        "Convert an amount of money",
        {
            "amount": integer(1, 9999),
            "source|from_currency": CURRENCY,
            "target|to_currency": CURRENCY,
        },
        ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?"),
        {"amount": integer(1, 9999), "currency": CURRENCY},
        "That is {amount} {currency}.",
    ),
    _tool(
        "convert_units|convert",
        "Convert a length or weight",
        {
            "value": decimal(1, 99),
            "from_unit|source": one_of("km", "miles", "kg", "pounds", "feet"),
            "to_unit|target": one_of("m", "yards", "g", "ounces", "inches"),
        },
        ("Convert {value} {from_unit} to {to_unit}.", "What is {value} {from_unit} in {to_unit}?"),
        {"result": decimal(1, 999)},
        "That is {result} {to_unit}.",
    ),
    _tool(
        "get_stock_price|stock_price|quote",
        "Get the price of a share",
        {"symbol|ticker": ORDER},
        ("What is the price of {symbol}?", "What does a share of {symbol} cost?"),
        {"price": decimal(1, 900), "currency": CURRENCY},
        "{symbol} is at {price} {currency}.",
    ),
    _tool(
        "get_balance|account_balance|balance",
        "Get the balance of an account",
        {"account|account_id": CODE},
        ("What is the balance of account {account}?", "How much money is on {account}?"),
        {"balance": decimal(1, 9999), "currency": CURRENCY},
        "The balance is {balance} {currency}.",
    ),
    _tool(
        "transfer_money|transfer|pay",
        "Send money to a person",
        {"to|recipient": PERSON, "amount": integer(1, 5000), "currency": CURRENCY},
        (
            "Send {amount} {currency} to {to}{+}.",
            "Transfer {amount} {currency} to {to}{+}.",
            "Pay {to} {amount} {currency}{+}.",
        ),
        {"id": CODE},
        "I sent {amount} {currency} to {to}.",
        reference=(PHRASE, " with the reference {}"),
    ),
    _tool(
        "search_products|find_products|product_search",
        "Search the shop",
        {"query|product": THING},
        ("Find me a {query}{+}.", "Do you sell a {query}{+}?", "I am looking for a {query}{+}."),
        {"id": ORDER, "price": integer(1, 900)},
        "I found one for {price} dollars, number {id}.",
        max_price=(integer(5, 900), " for at most {} dollars"),
    ),
    _tool(
        "add_to_cart|cart_add",
        "Put a product into the cart",
        {"product|item": THING, "quantity|count": integer(1, 12)},
        (
            "Put {quantity} of the {product} into my cart.",
            "Add the {product} to my cart, {quantity} times.",
        ),
        {"items": integer(1, 40)},
        "Your cart now holds {items} items.",
    ),
    _tool(
        "get_order_status|order_status|track_order",
        "Get the state of an order",
        {"order|order_id|number": ORDER},
        (
            "Where is my order {order}?",
            "What is the status of order {order}?",
            "Track order {order}.",
        ),
        {"status": STATE, "date": DATE},
        "The order is {status}; the date is {date}.",
    ),
    _tool(
        "cancel_order|order_cancel",
        "Cancel an order",
        {"order|order_id": ORDER},
        ("Cancel order {order}{+}.", "Please cancel my order {order}{+}."),
        {"status": one_of("cancelled")},
        "Order {order} is cancelled.",
        reason=(PHRASE, ", the reason is {}"),
    ),
    _tool(
        "create_ticket|open_ticket|new_ticket",
        "Open a support ticket",
        {"title|subject": PHRASE, "priority": one_of("low", "medium", "high")},
        (
            "Open a ticket {title} with {priority} priority{+}.",
            "Create a {priority} priority ticket: {title}{+}.",
        ),
        {"id": ORDER},
        "The ticket is {id}.",
        tags=(listing(WORD, 1, 3), ", with the tags {}"),
    ),
    _tool(
        "close_ticket|resolve_ticket",
        "Close a support ticket",
        {"ticket|ticket_id|id": ORDER},
        ("Close ticket {ticket}.", "Ticket {ticket} is solved, close it."),
        {"status": one_of("closed")},
        "Ticket {ticket} is closed.",
    ),
    _tool(
        "play_music|play_song|play",
        "Play music",
        {"artist|by": PERSON},
        ("Play music by {artist}{+}.", "Play something by {artist}{+}."),
        {"title": PHRASE},
        'Now playing "{title}" by {artist}.',
        shuffle=(switch(), " in random order"),
    ),
    _tool(
        "set_volume|volume",
        "Set the volume",
        {"level|volume": integer(0, 100)},
        ("Set the volume to {level}.", "Volume {level}, please."),
        _DONE,
        "The volume is {level}.",
    ),
    _tool(
        "turn_on|switch_on|device_on",
        "Switch a device on",
        {"device": THING, "room|place": ROOM},
        ("Turn on the {device} in the {room}.", "Switch the {device} in the {room} on."),
        _DONE,
        "The {device} is on.",
    ),
    _tool(
        "set_light|light|set_lamp",
        "Set colour and brightness of the light in a room",
        {"room": ROOM, "colour|color": COLOUR},
        (
            "Make the light in the {room} {colour}{+}.",
            "Set the light in the {room} to {colour}{+}.",
        ),
        _DONE,
        "The light in the {room} is {colour}.",
        brightness=(integer(1, 100), " at {} percent"),
    ),
    _tool(
        "set_temperature|thermostat|heat",
        "Set the temperature of a room",
        {"room": ROOM, "temperature|degrees": integer(12, 28)},
        ("Set the {room} to {temperature} degrees.", "Heat the {room} to {temperature} degrees."),
        _DONE,
        "The {room} is set to {temperature} degrees.",
    ),
    _tool(
        "book_flight|flight_booking|buy_flight",
        "Book a flight",
        {"origin|from_city|start": CITY, "destination|to_city": CITY, "date": DATE},
        (
            "Book a flight from {origin} to {destination} on {date}{+}.",
            "I want to fly from {origin} to {destination} on {date}{+}.",
        ),
        {"booking": ORDER},
        "Your flight is booked, number {booking}.",
        passengers=(integer(2, 6), " for {} people"),
    ),
    _tool(
        "book_hotel|reserve_hotel|hotel",
        "Book a hotel room",
        {"city": CITY, "date|check_in": DATE, "nights": integer(1, 14)},
        (
            "Book a hotel in {city} from {date} for {nights} nights.",
            "I need a room in {city} on {date} for {nights} nights.",
        ),
        {"hotel": WORD, "price": integer(40, 400)},
        "I booked the hotel {hotel} for {price} dollars.",
    ),
    _tool(
        "book_table|reserve_table|restaurant",
        "Reserve a table in a restaurant",
        {"restaurant|name": WORD, "people|guests|party_size": integer(2, 12), "time": TIME},
        (
            "Reserve a table for {people} at {restaurant} at {time}.",
            "Book a table at {restaurant} for {people} people at {time}.",
        ),
        {"confirmation": CODE},
        "The table is reserved, confirmation {confirmation}.",
    ),
    _tool(
        "get_directions|route|directions",
        "Get the way from one place to another",
        {"origin|start": CITY, "destination|goal": CITY},
        (
            "How do I get from {origin} to {destination}{+}?",
            "Show me the way from {origin} to {destination}{+}.",
        ),
        {"distance_km": integer(5, 3000), "minutes": integer(10, 900)},
        "It is {distance_km} km and takes {minutes} minutes.",
        mode=(one_of("car", "train", "bus", "bicycle"), " by {}"),
    ),
    _tool(
        "find_restaurants|restaurants_nearby",
        "Find restaurants in a city",
        {"city|location": CITY, "food|cuisine": FOOD},
        ("Where can I eat {food} in {city}?", "Find a restaurant with {food} in {city}."),
        {"name": WORD, "rating": decimal(1, 5)},
        "Try {name}; it is rated {rating}.",
    ),
    _tool(
        "get_recipe|recipe|find_recipe",
        "Get a recipe",
        {"dish|food|ingredient": FOOD},
        (
            "How do I cook {dish}{+}?",
            "Give me a recipe with {dish}{+}.",
            "A recipe for {dish}{+}, please.",
        ),
        {"ingredients": listing(FOOD, 2, 4), "minutes": integer(5, 120)},
        "You need {ingredients}, and {minutes} minutes.",
        servings=(integer(2, 8), " for {} people"),
    ),
    _tool(
        "get_contact|find_contact|lookup_contact",
        "Look a person up in the contacts",
        {"name|person": PERSON},
        (
            "What is the number of {name}?",
            "Look up {name} in my contacts.",
            "Find the contact {name}.",
        ),
        {"phone": ORDER, "email": EMAIL},
        "The phone number is {phone} and the e-mail address is {email}.",
    ),
    _tool(
        "add_contact|create_contact|new_contact",
        "Add a person to the contacts",
        {"name": PERSON, "email|mail": EMAIL},
        ("Add {name} with {email} to my contacts.", "Save the contact {name}, {email}."),
        {"id": CODE},
        "{name} is in your contacts.",
        address=(
            record("{street} {number} in {city}", street=WORD, number=integer(1, 99), city=CITY),
            ", address {}",
        ),
    ),
    _tool(
        "get_user|fetch_user|user_info",
        "Get a user's record by id",
        {"user_id|id|user": integer(1, 9999)},
        ("Who is user {user_id}?", "Get user {user_id}.", "Show me the record of user {user_id}."),
        {"name": PERSON, "city": CITY},
        "User {user_id} is {name} from {city}.",
    ),
    _tool(
        "create_user|add_user|register_user",
        "Create a user",
        {"name": PERSON, "email": EMAIL, "role": one_of("admin", "editor", "viewer")},
        ("Create the user {name} with {email} as {role}.", "Add {name}, {email}, role {role}."),
        {"user_id": integer(1, 9999)},
        "The user has the id {user_id}.",
    ),
    _tool(
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
    _tool(
        "get_news|news|headlines",
        "Get the latest news",
        {"topic|category": one_of("sports", "science", "business", "politics", "music", "health")},
        (
            "What is new in {topic}{+}?",
            "Give me the {topic} news{+}.",
            "Any news about {topic}{+}?",
        ),
        {"text": PHRASE},
        "The news: {text}",
        country=(COUNTRY, " from {}"),
    ),
    _tool(
        "define_word|dictionary|get_definition",
        "Look up a word in a dictionary",
        {"word|term": WORD},
        ("What does {word} mean?", "Define {word}.", "Look up the word {word}."),
        {"text": PHRASE},
        "It means: {text}",
    ),
    _tool(
        "get_population|population",
        "Get the population of a country",
        {"country": COUNTRY},
        ("How many people live in {country}?", "What is the population of {country}?"),
        {"population": integer(1000, 99999999), "year": integer(1990, 2030)},
        "{population} people lived in {country} in {year}.",
    ),
    _tool(
        "get_capital|capital_of",
        "Get the capital of a country",
        {"country": COUNTRY},
        ("What is the capital of {country}?", "Tell me the capital of {country}."),
        {"capital": CITY},
        "The capital of {country} is {capital}.",
    ),
    _tool(
        "random_number|roll|get_random",
        "Draw a random number",
        {"min|low": integer(0, 10), "max|high": integer(11, 1000)},
        ("Give me a random number between {min} and {max}.", "Pick a number from {min} to {max}."),
        {"number": integer(0, 1000)},
        "The number is {number}.",
    ),
    _tool(
        "roll_dice|dice",
        "Roll dice",
        {"count|n": integer(1, 6), "sides": integer(4, 20)},
        ("Roll {count} dice with {sides} sides.", "Roll {count} dice of {sides} sides each."),
        {"total": integer(1, 120)},
        "The total is {total}.",
    ),
    _tool(
        "create_note|add_note|save_note",
        "Save a note",
        {"text|content|note": PHRASE},
        ("Make a note: {text}{+}.", "Note down {text}{+}.", "Save the note {text}{+}."),
        {"id": CODE},
        "I saved the note as {id}.",
        folder=(WORD, " in the folder {}"),
    ),
    _tool(
        "search_notes|find_note",
        "Search the notes",
        {
            "query|keyword": WORD,
        },
        ("Find my note about {query}.", "Search my notes for {query}."),
        {"text": PHRASE},
        "Your note says: {text}",
    ),
    _tool(
        "add_task|create_task|new_todo",
        "Add a task to the list",
        {"title|task": PHRASE},
        ("Add the task {title}{+}.", "Put {title} on my list{+}."),
        {"id": integer(1, 999)},
        "The task has number {id}.",
        due=(DATE, ", due on {}"),
        priority=(integer(1, 5), ", priority {}"),
    ),
    _tool(
        "complete_task|finish_task",
        "Mark a task as done",
        {"task_id|id|number": integer(1, 999)},
        ("Task {task_id} is done.", "Mark task {task_id} as done.", "Complete task {task_id}."),
        {"open": integer(0, 50)},
        "Done. {open} tasks are still open.",
    ),
    _tool(
        "order_pizza|pizza",
        "Order a pizza",
        {"size": one_of("small", "medium", "large"), "toppings": listing(FOOD, 1, 3)},
        ("Order a {size} pizza with {toppings}.", "I want a {size} pizza with {toppings}."),
        {"minutes": integer(15, 90), "price": integer(8, 30)},
        "It costs {price} dollars and comes in {minutes} minutes.",
    ),
    _tool(
        "call_taxi|taxi|book_taxi",
        "Order a taxi",
        {"pickup|start": ROOM, "destination|goal": ROOM},
        (
            "I need a taxi from the {pickup} to the {destination}{+}.",
            "Call a taxi from the {pickup} to the {destination}{+}.",
        ),
        {"driver": PERSON, "minutes": integer(2, 40)},
        "{driver} will be there in {minutes} minutes.",
        time=(TIME, " at {}"),
    ),
    _tool(
        "get_train|train_times|next_train",
        "Find the next train",
        {"origin|start": CITY, "destination|goal": CITY},
        (
            "When is the next train from {origin} to {destination}?",
            "Find a train from {origin} to {destination}.",
        ),
        {"departure": TIME, "platform": integer(1, 24)},
        "The train leaves at {departure} from platform {platform}.",
    ),
    _tool(
        "check_stock|inventory|in_stock",
        "Check how many of an item are in the warehouse",
        {"item|product": THING},
        (
            "How many of the {item} do we have?",
            "Is the {item} in stock?",
            "Check the stock of the {item}.",
        ),
        {"count": integer(0, 500)},
        "We have {count} of the {item}.",
    ),
    _tool(
        "animal_facts|get_animal",
        "Get facts about an animal",
        {"animal|name": ANIMAL},
        ("How big is the {animal}?", "Tell me something about the {animal}."),
        {"weight_kg": decimal(1, 900), "lifespan": integer(1, 90)},
        "The {animal} weighs {weight_kg} kg and lives {lifespan} years.",
    ),
    _tool(
        "calculate_tip|tip",
        "Calculate the tip for a bill",
        {"bill|amount": decimal(5, 300), "percent|percentage": integer(5, 25)},
        ("What is a {percent} percent tip on {bill} dollars?", "Tip {percent} percent on {bill}."),
        {"tip": lambda given: round(given["bill"] * given["percent"] / 100, 2)},
        "The tip is {tip} dollars.",
    ),
    _tool(
        "count_words|word_count",
        "Count the words of a text",
        {"text": PHRASE},
        ("How many words are in {text}?", "Count the words of {text}."),
        {"words": lambda given: len(given["text"].split())},
        "There are {words} words.",
    ),
    _tool(
        "get_date|today|current_date",
        "Get today's date",
        {},
        ("What is the date?", "Which day is it today?", "What is today's date?"),
        {"date": DATE},
        "Today is {date}.",
    ),
    _tool(
        "list_users|get_users|all_users",
        "List all users",
        {},
        ("Which users are there?", "List all users.", "Show me the users."),
        {"users": listing(PERSON, 1, 4)},
        "The users are {users}.",
    ),
    _tool(
        "get_status|status|health_check",
        "Get the state of the server",
        {},
        ("Is the server up?", "How is the server doing?", "Check the server."),
        {"status": STATE, "uptime_hours": integer(1, 999)},
        "The server is {status} and runs for {uptime_hours} hours.",
    ),
    _tool(
        "tell_joke|get_joke|random_joke",
        "Get a random joke",
        {},
        ("Tell me a joke.", "I need a joke.", "Do you know a joke?"),
        {"text": PHRASE},
        "Here is one: {text}",
    ),
    _tool(
        "get_location|where_am_i",
        "Get the city that the user is in",
        {},
        ("Where am I?", "In which city am I?"),
        {"city": CITY},
        "You are in {city}.",
    ),
    _tool(
        "apply_patch|edit_file|replace_in_file",
        "Replace a text in a file",
        {"path|file": PATH, "old|search": WORD, "new|replace": WORD},
        ("Replace {old} with {new} in {path}.", "In {path}, change {old} to {new}{+}."),
        {"changes": integer(1, 20)},
        "I made {changes} changes in {path}.",
        all=(switch(), " everywhere"),
    ),
    _tool(
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
    _tool(
        "http_get|fetch_url|fetch|get_url",
        "Fetch a web page",
        {"url|address": URL},
        ("Fetch {url}.", "What is on {url}?", "Get the page {url}."),
        {"text": PHRASE},
        "The page says: {text}",
    ),
    _tool(
        "lock_door|lock",
        "Lock a door",
        {"door|room": ROOM},
        ("Lock the door of the {door}.", "Is the {door} locked? If not, lock it."),
        {"locked": one_of("yes")},
        "The door of the {door} is locked.",
    ),
)
