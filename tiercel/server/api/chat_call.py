"""The generation of an answer to messages, for all APIs that have them."""

from dataclasses import dataclass

from msgspec.structs import replace

from tiercel.server.api.context import ServerContext
from tiercel.server.api.params import ModelLimits, SamplingPlan, chat_plan
from tiercel.server.api.prompt import chat_work, empty_prompt
from tiercel.server.api.schemas.chat import ChatFields, MessageFields
from tiercel.server.api.structured import check_ends
from tiercel.server.api.tool_choice import ToolChoice, read_tool_choice
from tiercel.server.api.tool_grammar import tool_constraint
from tiercel.server.api.truncation import truncation_of
from tiercel.server.text.answer.reader import AnswerReader
from tiercel.server.text.chat_template import ChatPrompt, ChatTemplate


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request with messages, whose fields have been checked. `reader` splits its answers into their parts."""

    fields: ChatFields
    template: ChatTemplate
    context: ServerContext
    choice: ToolChoice
    reader: AnswerReader

    @staticmethod
    def of(fields: ChatFields, context: ServerContext) -> "ChatCall":
        """Return the call of a request. Errors: AdmissionError (400)."""
        choice = read_tool_choice(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        reader = context.answer_style.reader(choice, shows_thoughts=fields.include_reasoning is not False)
        return ChatCall(fields, context.chat_template(), context, choice, reader)

    @property
    def num_prompts(self) -> int:
        """Number of prompts: one."""
        return 1

    @property
    def field(self) -> str:
        """The field that has the prompt, for refusals."""
        return "messages"

    @property
    def expanded_bytes(self) -> int:
        """The memory of what the body stands for beyond its own values: nothing."""
        return 0

    def plan(self, limits: ModelLimits) -> SamplingPlan:
        """Return how the answer is sampled. Errors: AdmissionError (400).

        Calls are constrained behind the thoughts, and the prompt says whether there are some: call `tokenize` before.
        """
        plan = chat_plan(self.fields, self.context.defaults, limits)
        reader, form = self.reader, self.reader.form
        if plan.constraint is not None and self.choice.mode != "required":
            reader.drop_thoughts()  # the constraint is that of the whole answer
        elif form is not None and self.choice.needs_grammar:
            ids = self.context.codec.vocabulary.special_id_by_text
            path, tools = self.fields.schema_paths.parameters, self.fields.tools or ()
            paths = {tool.function.name: path.format(number) for number, tool in enumerate(tools)}
            plan = replace(plan, constraint=tool_constraint(form, self.choice, reader, ids, paths))
            if self.fields.ignore_eos and plan.constraint is not None:
                check_ends(plan.constraint, ignore_eos=True)
        rules = replace(plan.rules, visible_texts=self.reader.marks | self.template.visible_marks)
        return replace(plan, rules=rules, is_parsed=not self.reader.is_plain)

    async def tokenize(self, limits: ModelLimits) -> list[list[int]]:
        """Return the tokens of the prompt. Errors: AdmissionError (400)."""
        fields, context = self.fields, self.context
        truncation = truncation_of(fields, limits, fields.max_outputs)
        most = None if truncation is None else context.max_values
        work = chat_work(fields, self.template, context.codec, limits, most_tokens=most, truncation=truncation)
        return [self.begin(await context.in_worker(work))]

    def render(self, messages: list[MessageFields], limits: ModelLimits) -> ChatPrompt:
        """Return the prompt of other messages than those of `fields`. For workers. Errors: AdmissionError (400)."""
        fields = self.fields.model_copy(update={"messages": messages})
        return chat_work(fields, self.template, self.context.codec, limits)()

    def begin(self, prompt: ChatPrompt) -> list[int]:
        """Take the prompt behind which the answer begins, and return its tokens. Errors: AdmissionError (400)."""
        if not prompt.tokens:
            raise empty_prompt()
        self.reader.begin(prompt.text)
        return prompt.tokens
