//! Keys and values that recipes used to have, and what they are called now.
//!
//! Old names are not accepted. They cause errors that give the new names, so that a recipe for an earlier version is quick to
//! update. Guesses about misspelt keys are in `intent`.

use toml::Value;

/// Old keys and new keys.
const KEYS: &[(&str, &str)] = &[
    ("model.from", "model.from_pretrained"),
    ("model.llama.vocabulary", "model.llama.vocab_size"),
    ("model.llama.width", "model.llama.hidden_size"),
    ("model.llama.blocks", "model.llama.num_hidden_layers"),
    ("model.llama.heads", "model.llama.num_attention_heads"),
    ("model.llama.kv_heads", "model.llama.num_key_value_heads"),
    ("model.llama.head_width", "model.llama.head_dim"),
    ("model.llama.mlp_width", "model.llama.intermediate_size"),
    ("model.llama.rope_base", "model.llama.rope_theta"),
    ("model.llama.norm_epsilon", "model.llama.rms_norm_eps"),
    ("model.llama.tied", "model.llama.tie_word_embeddings"),
    ("model.llama.window", "model.llama.sliding_window"),
    ("model.llama.init_std", "model.llama.initializer_range"),
    ("model.llama.head_chunk", "model.llama.loss_chunk_tokens"),
    ("model.gpt2.vocabulary", "model.gpt2.vocab_size"),
    ("model.gpt2.positions", "model.gpt2.n_positions"),
    ("model.gpt2.width", "model.gpt2.n_embd"),
    ("model.gpt2.blocks", "model.gpt2.n_layer"),
    ("model.gpt2.heads", "model.gpt2.n_head"),
    ("model.gpt2.head_chunk", "model.gpt2.loss_chunk_tokens"),
    ("start", "init"),
    ("start.seed", "init.seed"),
    ("start.weights", "init.weights"),
    ("data.tokens", "data.corpus"),
    ("evaluation.windows", "evaluation.max_sequences"),
    ("batch.sequences", "batch.micro_batch_size"),
    ("batch.micro_batches", "batch.gradient_accumulation_steps"),
    ("batch.global", "batch.global_batch_size"),
    ("batch.positions", "batch.seq_len"),
    ("sharding", "zero"),
    ("sharding.stage", "zero.stage"),
    ("sharding.units_in_flight", "zero.prefetch"),
    ("sharding.accumulation", "zero.reduce_each_micro_batch"),
    ("sharding.replicas", "parallel.replicate"),
    ("recomputation", "activation_checkpointing"),
    ("precision.parameters", "precision.param_dtype"),
    ("precision.gradients", "precision.reduce_dtype"),
    ("optimizer.rate", "optimizer.lr"),
    ("optimizer.epsilon", "optimizer.eps"),
    ("optimizer.clip_norm", "optimizer.max_grad_norm"),
    ("schedule.end", "schedule.min_lr_ratio"),
    ("schedule.start", "schedule.start_lr_ratio"),
    ("schedule.rising", "schedule.pct_start"),
    ("schedule.from", "schedule.start_lr"),
    ("run.print_every", "run.log_every"),
    ("run.on_not_finite", "run.on_nonfinite"),
    ("checkpoints.buffer", "checkpoints.buffer_bytes"),
    ("supervision.time_limit_s", "supervision.timeout_s"),
    ("supervision.silence_s", "supervision.heartbeat_timeout_s"),
    ("supervision.restarts", "supervision.max_restarts"),
    ("supervision.checked", "supervision.verify_collectives"),
    ("supervision.on_outlier", "supervision.on_spike"),
];

/// Keys, former words for their values, and the new values as written in a recipe.
const VALUES: &[(&str, &str, &str)] = &[
    ("schedule.kind", "1-cycle", "\"one-cycle\""),
    ("schedule.kind", "range-test", "\"lr-range-test\""),
    ("schedule.kind", "stable-decay", "\"wsd\""),
    ("supervision.on_spike", "go-back", "\"rollback\""),
    ("zero.reduce_each_micro_batch", "whole", "false"),
    ("zero.reduce_each_micro_batch", "sharded", "true"),
];

/// The new key of an old one.
pub(super) fn new_key(old: &str) -> Option<&'static str> {
    KEYS.iter().find(|(key, _)| *key == old).map(|(_, new)| *new)
}

/// Whether an old key is a table that was renamed, or whose keys were moved to other tables.
pub(super) fn is_table(old: &str) -> bool {
    KEYS.iter().any(|(key, _)| key.strip_prefix(old).is_some_and(|rest| rest.starts_with('.')))
        && KEYS.iter().any(|(key, _)| *key == old)
}

/// A sentence that says what a former value of a key is now.
pub(super) fn new_value(key: &str, given: &Value) -> Option<String> {
    let old = given.as_str()?;
    let (.., new) = VALUES.iter().find(|(of, word, _)| *of == key && *word == old)?;
    Some(format!("\"{old}\" is now {new}"))
}

/// The error for a key, if it is an old one; it also covers the value if that was renamed too.
pub(super) fn problem(old: &str, given: Option<&Value>) -> Option<String> {
    let new = new_key(old)?;
    let renamed = match is_table(old) {
        true => format!("[{old}] is now [{new}]"),
        false => format!("`{old}` is now `{new}`"),
    };
    match given.and_then(|given| new_value(new, given)) {
        Some(value) => Some(format!("{renamed}, and {value}")),
        None => Some(renamed),
    }
}

#[cfg(test)]
mod tests {
    use toml::Table;

    use super::super::faults::{faults, unknown};
    use super::super::schema;
    use super::super::schema::{Node, Shape};
    use super::*;

    /// A table with one value at a dotted key.
    fn nested(key: &str, value: Value) -> Table {
        let nest = |value: Value, name: &str| Value::Table(Table::from_iter([(name.to_string(), value)]));
        match key.rsplit('.').fold(value, nest) {
            Value::Table(table) => table,
            other => panic!("{other} is not a table"),
        }
    }

    /// The problems that are reported for a key of a recipe.
    fn problems(key: &str, value: Value) -> Vec<String> {
        let schema = schema();
        let found = faults(&nested(key, value), Node(&schema)).into_iter();
        found.filter(|fault| fault.keys.iter().any(|(at, _)| at == key)).map(|fault| fault.problem).collect()
    }

    #[test]
    fn an_old_key_is_an_error_that_names_the_new_one() {
        let schema = schema();
        for (old, new) in KEYS {
            let (value, expected) = match is_table(old) {
                true => (Value::Table(Table::new()), format!("[{old}] is now [{new}]")),
                false => (Value::Integer(1), format!("`{old}` is now `{new}`")),
            };
            assert_eq!(problems(old, value), std::slice::from_ref(&expected));
            assert_eq!(unknown(old, None, Node(&schema), &Table::new()), expected);
        }
    }

    #[test]
    fn a_new_key_is_in_the_schema_and_an_old_one_is_not() {
        let schema = schema();
        for (old, new) in KEYS {
            assert!(Node(&schema).find(new).is_some(), "there is no {new}");
            assert!(Node(&schema).find(old).is_none(), "there still is {old}");
        }
        for (key, old, new) in VALUES {
            let shape = Node(&schema).find(key).unwrap_or_else(|| panic!("there is no {key}")).shape();
            match shape {
                Shape::Words(words) => {
                    assert!(words.contains(&new.trim_matches('"')), "{key} cannot be {new}");
                    assert!(!words.contains(old), "{key} can still be {old}");
                }
                Shape::Flag => assert!(new.parse::<bool>().is_ok(), "{key} cannot be {new}"),
                _ => panic!("{key} has neither words nor true and false"),
            }
        }
    }

    #[test]
    fn a_new_key_that_is_required_is_not_missing_as_well() {
        let schema = schema();
        let found = faults(&nested("optimizer.rate", Value::Float(1e-3)), Node(&schema));
        assert!(!found.iter().any(|fault| fault.problem.contains("`optimizer.lr` is missing")), "{found:?}");
    }

    #[test]
    fn an_old_value_is_an_error_that_names_the_new_one() {
        for (key, old, new) in VALUES {
            let found = problems(key, Value::from(*old));
            assert!(found.len() == 1 && found[0].ends_with(&format!(": \"{old}\" is now {new}")), "{found:?}");
        }
        assert_eq!(
            problems("sharding.accumulation", Value::from("sharded")),
            ["`sharding.accumulation` is now `zero.reduce_each_micro_batch`, and \"sharded\" is now true"]
        );
        assert_eq!(
            problems("supervision.on_outlier", Value::from("go-back")),
            ["`supervision.on_outlier` is now `supervision.on_spike`, and \"go-back\" is now \"rollback\""]
        );
        assert_eq!(
            problems("schedule.kind", Value::from("1-cycle")),
            [
                "`schedule.kind` is \"1-cycle\", but must be one of \"constant\", \"linear\", \"cosine\", \"wsd\", \"one-cycle\", \
              \"lr-range-test\": \"1-cycle\" is now \"one-cycle\""
            ]
        );
    }

    #[test]
    fn a_table_that_was_split_reports_each_of_its_keys() {
        let schema = schema();
        let old =
            Table::from_iter([("stage".to_string(), Value::Integer(2)), ("depth".to_string(), Value::Integer(1))]);
        let found = faults(&nested("sharding", Value::Table(old)), Node(&schema));
        let said: Vec<&str> = found.iter().map(|fault| fault.problem.as_str()).collect();
        assert!(said.contains(&"`sharding.stage` is now `zero.stage`"), "{said:?}");
        assert!(said.iter().any(|problem| problem.starts_with("there is no key `sharding.depth`")), "{said:?}");
        assert!(!said.iter().any(|problem| problem.starts_with("[sharding]")), "{said:?}");
    }
}
