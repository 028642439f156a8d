"""OpenAI's Python client against an smg gateway; run in an environment of its own.

Usage: openai_client.py BASE_URL MODEL. Prints JSON.
"""

import json
import sys

import openai

base_url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url, api_key="none", timeout=30, max_retries=3)
options = {"model": model, "max_tokens": 12, "temperature": 0}
messages = [{"role": "user", "content": "Who is there?"}]

text = client.completions.create(prompt="ROMEO:", **options)
text_stream = list(client.completions.create(prompt="ROMEO:", stream=True, **options))
chat = client.chat.completions.create(messages=messages, **options)
chat_stream = list(client.chat.completions.create(messages=messages, stream=True, **options))
print(
    json.dumps(
        {
            "completion": text.choices[0].text,
            "completion_streamed": "".join(c.choices[0].text for c in text_stream if c.choices),
            "completion_tokens": text.usage.completion_tokens,
            "chat": chat.choices[0].message.content,
            "chat_streamed": "".join(
                c.choices[0].delta.content or "" for c in chat_stream if c.choices
            ),
            "chat_finish_reason": chat.choices[0].finish_reason,
        }
    )
)
