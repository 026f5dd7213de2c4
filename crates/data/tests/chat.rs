//! Conversations: which tokens are answers, limits on templates, and packing.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use shardwise_data::{ChatTemplate, Conversation, Error, IGNORED, Message, PackedConversations, Result, Tokenizer};

const CHATML: &str = "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
                      '<|im_end|>' + '\\n' -}}\n{% endfor %}\n{% if add_generation_prompt %}\n    \
                      {{- '<|im_start|>assistant\\n' -}}\n{% endif %}\n";

/// A model folder with this template. Its tokens are bytes and the two markers of ChatML.
fn folder_with(template: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bytes = Tokenizer::train_bpe(std::iter::empty(), 257, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    bytes.save(folder.path()).unwrap();
    let path = folder.path().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (number, marker) in ["<|im_start|>", "<|im_end|>"].iter().enumerate() {
        let mut token = json["added_tokens"][0].clone();
        token["id"] = (257 + number).into();
        token["content"] = (*marker).into();
        json["added_tokens"].as_array_mut().unwrap().push(token);
    }
    std::fs::write(path, json.to_string()).unwrap();
    let config = serde_json::json!({"eos_token": "<|im_end|>", "chat_template": template});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn open(folder: &Path) -> (Tokenizer, ChatTemplate) {
    let tokenizer = Tokenizer::open(folder).unwrap();
    // 15 March 2024.
    let template = ChatTemplate::open(&tokenizer, UNIX_EPOCH + Duration::from_secs(1_710_500_000)).unwrap();
    (tokenizer, template)
}

fn messages(turns: &[(&str, &str)]) -> Vec<Message> {
    let turns: Vec<_> =
        turns.iter().map(|(role, content)| serde_json::json!({"role": role, "content": content})).collect();
    serde_json::from_value(turns.into()).unwrap()
}

fn render(template: &str) -> Result<String> {
    let folder = folder_with(template);
    let (_, template) = open(folder.path());
    template.render(&messages(&[("user", " Q ")]), true)
}

#[test]
fn only_answers_and_what_ends_them_are_learned() {
    let folder = folder_with(CHATML);
    let (tokenizer, template) = open(folder.path());
    let turns = messages(&[("system", "S"), ("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "é")]);
    let conversation = template.conversation(&tokenizer, &turns).unwrap();
    let text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n\
                <|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\né<|im_end|>\n";
    assert_eq!(tokenizer.decode(&conversation.tokens).unwrap(), text);
    assert_eq!(conversation.tokens.iter().filter(|&&token| token >= 257).count(), 10, "markers are one token each");
    let learned: Vec<u32> = conversation
        .tokens
        .iter()
        .zip(&conversation.answers)
        .filter(|(_, answer)| **answer)
        .map(|(&token, _)| token)
        .collect();
    assert_eq!(tokenizer.decode(&learned).unwrap(), "ab<|im_end|>\né<|im_end|>\n");
    // é is two tokens of one byte.
    assert_eq!(learned.len(), 2 + 2 + 2 + 2);
}

#[test]
fn files_of_conversations_are_read_and_packed() {
    let folder = folder_with(CHATML);
    let (tokenizer, template) = open(folder.path());
    let line = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}"#;
    let path = folder.path().join("chat.jsonl.zst");
    std::fs::write(&path, zstd::encode_all(format!("{line}\n\n{line}\n").as_bytes(), 1).unwrap()).unwrap();
    let conversations = template.conversations(&tokenizer, &path).unwrap();
    let packed = PackedConversations::new(conversations, 64, tokenizer.end_of_text().unwrap()).unwrap();
    assert_eq!((packed.count(), packed.conversations(), packed.truncated()), (1, 2, 0));
    let window = packed.window(0).unwrap();
    let said: Vec<u32> =
        window.targets.iter().filter(|&&target| target != IGNORED).map(|&target| target as u32).collect();
    assert_eq!(tokenizer.decode(&said).unwrap(), "a<|im_end|>\na<|im_end|>\n");

    std::fs::write(folder.path().join("bad.jsonl"), format!("{line}\n{{\"messages\":3}}\n")).unwrap();
    let all: Vec<_> = template.conversations(&tokenizer, folder.path().join("bad.jsonl")).unwrap().collect();
    assert_eq!(all.len(), 2);
    assert!(all[1].as_ref().unwrap_err().to_string().contains("bad.jsonl, document 2"));
}

#[test]
fn templates_find_what_transformers_gives_them() {
    let is = |template: &str, text: &str| assert_eq!(render(template).unwrap(), text, "{template}");
    is("{{ messages[0].content.strip() }}|{{ messages[0]['content'].split('Q')|length }}", "Q|2");
    is("{{ strftime_now('%d %b %Y') }}", "15 Mar 2024");
    is("{{ {'a': [1, '<é>'], 'b': none} | tojson }}", "{\"a\": [1, \"<é>\"], \"b\": null}");
    is("{{ [1] | tojson(indent=2) }}", "[\n  1\n]");
    is("{{ bos_token }}{{ eos_token }}{% if tools is none %}!{% endif %}", "<|im_end|>!");
    is("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01");
    is("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2");
    is("  {% if true %}\nx\n  {% endif %}\n", "x\n");
    is("a {%- generation -%} b {%- endgeneration -%} c", "abc");
    assert!(render("{{ raise_exception('only users') }}").unwrap_err().to_string().contains("only users"));
    assert!(render("{{ strftime_now('%') }}").is_err());
}

#[test]
fn templates_that_run_forever_or_rewrite_the_past_are_refused() {
    let forever = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(forever), Err(Error::Template { .. })));
    let long =
        format!("{{% for a in range(9999) %}}{{% for b in range(99) %}}{}{{% endfor %}}{{% endfor %}}", "x".repeat(99));
    assert!(render(&long).unwrap_err().to_string().contains("longer than"));
    for large in ["{{ 'x' * 1000000000 }}", "{# * #}*{% set x = '\\'' *9 %}"] {
        let folder = folder_with(large);
        let error = ChatTemplate::open(&Tokenizer::open(folder.path()).unwrap(), UNIX_EPOCH).unwrap_err();
        assert!(error.to_string().contains("it uses multiplication"), "{large}: {error}");
    }
    assert_eq!(render("* {# * #}{{ 'a*\\'*' }}*").unwrap(), "* a*'**");

    let folder = folder_with("{% for m in messages %}{{ m.content if loop.last else '-' }};{% endfor %}");
    let (tokenizer, template) = open(folder.path());
    let turns = messages(&[("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]);
    let error = template.conversation(&tokenizer, &turns).unwrap_err().to_string();
    assert!(error.contains("message 2") && error.contains("tokenizer_config.json"), "{error}");
}

#[test]
fn a_template_cannot_take_much_memory() {
    for doubles in [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = [ns.x, ns.x]|join %}",
        "{% set ns.x = ''.join([ns.x, ns.x]) %}",
        "{% set ns.x = ns.x|replace('x', 'xx') %}",
        "{% set ns.x = ns.x.replace('x', 'xx') %}",
        "{% set ns.x = '{}{}'.format(ns.x, ns.x) %}",
        "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.x = twice(ns.x) %}",
        "{% set ns.x = ns.x|replace('', ns.x) %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = [ns.l, ns.l] %}",
        "{% set ns.l = (ns.l, ns.l) %}",
        "{% set ns.l = {'a': ns.l, 'b': ns.l} %}",
    ] {
        let template =
            format!("{{% set ns = namespace(x='x', l=[1]) %}}{{% for i in range(40) %}}{doubles}{{% endfor %}}");
        let error = render(&template).expect_err(doubles).to_string();
        assert!(error.contains("it creates a value of more than 2097152 bytes"), "{doubles}: {error}");
    }
    let large = "{% set l = [0]|string|replace('0', 'x')|indent(1000000000, true) %}";
    assert!(render(large).unwrap_err().to_string().contains("more than 2097152 bytes"));
    assert!(render("{{ '{:1000000000}'.format(1) }}").unwrap_err().to_string().contains("a width"));
    assert!(render("{{ '{:{}}'.format(1, 1000000000) }}").unwrap_err().to_string().contains("a width"));
    // A namespace could grow after the list was checked.
    assert!(render("{% set ns = namespace() %}{% set l = [ns] %}").unwrap_err().to_string().contains("a namespace"));
    assert!(render("{{ [namespace()] }}").unwrap_err().to_string().contains("namespaces"));
    // Many small values.
    let many = "{% set ns = namespace(x='x') %}{% for i in range(20) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}\
                {% for i in range(9999) %}{% set y = ns.x ~ i %}{% endfor %}";
    assert!(render(many).unwrap_err().to_string().contains("add up to more than 134217728 bytes"));
    // Long text captured into a variable by few instructions.
    let text = "x".repeat(9999);
    let captured = format!("{{% set x %}}{{% for i in range(9999) %}}{text}{{% endfor %}}{{% endset %}}");
    assert!(render(&captured).unwrap_err().to_string().contains("longer than 16777216 bytes"));
}

#[test]
fn limited_operations_behave_like_jinjas() {
    let is = |template: &str, text: &str| assert_eq!(render(template).unwrap(), text, "{template}");
    is("{{ 'a-b-c'|replace('-', '+') }}{{ 'aab'.replace('a', 'c', 1) }}", "a+b+ccab");
    is(
        "{{ [1, 'b', none]|join(', ') }}|{{ ['a', 'b']|join }}|{{ messages|join('', attribute='role') }}",
        "1, b, None|ab|user",
    );
    is("{{ 'a\n\nb\n'|indent }}|{{ 'a\nb'|indent(2, first=true) }}", "a\n\n    b|  a\n  b");
    is("{{ '{} and {:>3}'.format(1, 2) }}{{ ', '.join(['a', 'b']) }}", "1 and   2a, b");
    is("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) ~ m('a' + 'b') }}", "<1><ab>");
    is("{% for m in messages[0:] %}{% if loop.last %}{{ m.role }}{% endif %}{% else %}none{% endfor %}", "user");
    is("{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }};{% endfor %}", "1;2;;;3;");
    is("{% set a = namespace(b=namespace(c=1)) if false else namespace(c=2) %}{% set a.d = a.c %}{{ a.d }}", "2");
    is("{% set x %}a{{ 1 + 1 }}{% endset %}{{ x }}{{ [1, [2]]|string }}", "a2[1, [2]]");
}

#[test]
fn a_template_may_be_a_file_or_one_of_several() {
    let folder = folder_with("old");
    let config =
        serde_json::json!({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(open(folder.path()).1.render(&[], false).unwrap(), "d");
    std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(open(folder.path()).1.render(&[], false).unwrap(), "file");
    let none = folder_with("x");
    std::fs::remove_file(none.path().join("tokenizer_config.json")).unwrap();
    let error = ChatTemplate::open(&Tokenizer::open(none.path()).unwrap(), UNIX_EPOCH).unwrap_err();
    assert!(error.to_string().contains("no chat template"));
}

#[test]
fn windows_are_filled_in_order_and_targets_stay_within_a_conversation() {
    let conversation = |tokens: &[u32], from: usize| {
        let answers = (0..tokens.len()).map(|place| place >= from).collect();
        Ok(Conversation { tokens: tokens.to_vec(), answers })
    };
    let conversations = [
        conversation(&[1, 2, 3, 4], 2),
        conversation(&[11, 12, 13], 0),
        conversation(&[21, 22], 1),
        conversation(&[31, 32, 33, 34, 35, 36, 37, 38], 4),
        conversation(&[41, 42], 2),
        conversation(&[51, 52, 53, 54, 55, 56, 57, 58], 6),
    ];
    let packed = PackedConversations::new(conversations, 6, 99).unwrap();
    // Two are too long; the fifth has no answer, and the sixth none after truncation.
    assert_eq!((packed.count(), packed.conversations(), packed.truncated(), packed.without_answers()), (3, 4, 2, 2));
    let first = packed.window(0).unwrap();
    assert_eq!(first.tokens, [1, 2, 3, 4, 21, 22]);
    assert_eq!(first.targets, [IGNORED, 3, 4, IGNORED, 22, IGNORED]);
    assert_eq!(first.documents, [0, 0, 0, 0, 1, 1]);
    let second = packed.window(1).unwrap();
    assert_eq!(second.tokens, [11, 12, 13, 99, 99, 99]);
    assert_eq!(second.targets, [12, 13, IGNORED, IGNORED, IGNORED, IGNORED]);
    assert_eq!(second.documents, [0, 0, 0, 1, 1, 1]);
    assert_eq!(packed.window(2).unwrap().targets, [IGNORED, IGNORED, IGNORED, 35, 36, IGNORED]);
    assert!(packed.window(3).is_err());
    assert!(PackedConversations::new([], 1, 0).is_err() && PackedConversations::new([], 2, 0).unwrap().count() == 0);
}
