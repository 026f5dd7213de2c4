//! The headers of safetensors files: written as plainly as that format allows, and read with limits.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use shardwise_plan::Dtype;

use crate::place::elements;

/// The longest header that is read, as in the format's own library.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The type of its elements, or the name of one that is not known here.
    pub dtype: Result<Dtype, String>,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where its bytes are in the file.
    pub bytes: Range<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// How a file with these tensors begins; their bytes follow one after the other.
pub fn header(entries: &[Entry]) -> Vec<u8> {
    let mut offset = 0;
    let info = |entry: &Entry| {
        let bytes =
            elements(&entry.shape).expect("tensors that are written are in memory") * entry.dtype.bytes() as u64;
        let begin = offset;
        offset += bytes;
        let dtype = crate::dtype::name(entry.dtype).to_string();
        (entry.name.clone(), Info { dtype, shape: entry.shape.clone(), data_offsets: [begin, offset] })
    };
    let infos: BTreeMap<String, Info> = entries.iter().map(info).collect();
    // Some readers want to be told that the tensors are as PyTorch has them.
    let mut all = BTreeMap::from([("__metadata__".to_string(), json!({ "format": "pt" }))]);
    all.extend(infos.into_iter().map(|(name, info)| (name, json!(info))));
    let mut text = serde_json::to_vec(&all).expect("it is made of what JSON has");
    // Tensors begin where any type can.
    text.resize((text.len() + 8).next_multiple_of(64) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// How long a file's header is, from its first eight bytes and its length: what [`parse`] wants, without those eight.
pub fn header_len(first: [u8; 8], file_bytes: u64) -> Result<u64, String> {
    let len = u64::from_le_bytes(first);
    match len <= HEADER_BYTES_MAX && len.checked_add(8).is_some_and(|end| end <= file_bytes) {
        true => Ok(len),
        false => Err(format!("it is no safetensors file: its header would have {len} bytes")),
    }
}

/// The tensors that a header names. All of them lie within the file, none over another.
pub fn parse(header: &[u8], file_bytes: u64) -> Result<BTreeMap<String, Found>, String> {
    let infos: BTreeMap<String, &RawValue> =
        serde_json::from_slice(header).map_err(|error| format!("its header cannot be read: {error}"))?;
    let data_begin = 8 + header.len() as u64;
    let data_bytes = file_bytes.checked_sub(data_begin).ok_or("it is shorter than its header")?;
    let mut found = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for (name, value) in infos {
        if name == "__metadata__" {
            continue;
        }
        let at = |problem: &str| format!("{name}: {problem}");
        let info: Info = serde_json::from_str(value.get()).map_err(|error| at(&error.to_string()))?;
        let [begin, end] = info.data_offsets;
        if begin > end || end > data_bytes {
            return Err(at("it is not within the file"));
        }
        if begin < end && !taken.insert((begin, end)) {
            return Err(at("it shares its bytes with another"));
        }
        let dtype = crate::dtype::named(&info.dtype).ok_or(info.dtype);
        if let Ok(dtype) = &dtype {
            let bytes = elements(&info.shape).and_then(|len| len.checked_mul(dtype.bytes() as u64));
            if bytes != Some(end - begin) {
                return Err(at("its length is not that of its shape"));
            }
        }
        let bytes = data_begin + begin..data_begin + end;
        found.insert(name, Found { dtype, shape: info.shape, bytes });
    }
    let mut free = 0;
    for (begin, end) in taken {
        if begin < free {
            return Err("two of its tensors share bytes".to_string());
        }
        free = end;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may fail")]
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let entry = |name: &str, dtype, shape: &[u64]| Entry { name: name.to_string(), dtype, shape: shape.to_vec() };
        let entries =
            [entry("b", Dtype::F32, &[3, 5]), entry("a", Dtype::Bf16, &[7]), entry("empty", Dtype::U8, &[0, 4])];
        let header = header(&entries);
        assert_eq!(header.len() % 64, 0);
        let file_bytes = header.len() as u64 + 60 + 14;
        let len = header_len(header[..8].try_into().unwrap(), file_bytes).unwrap();
        assert_eq!(len as usize, header.len() - 8);
        let found = parse(&header[8..], file_bytes).unwrap();
        let begin = header.len() as u64;
        assert_eq!(found["b"], Found { dtype: Ok(Dtype::F32), shape: vec![3, 5], bytes: begin..begin + 60 });
        assert_eq!(found["a"].bytes, begin + 60..begin + 74);
        assert!(found["empty"].bytes.is_empty());
        assert!(parse(&header[8..], file_bytes - 1).is_err(), "a file that was cut off");
        // The format's own library reads it.
        let file = [&header[..], &[1; 74]].concat();
        let theirs = ::safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(theirs.tensor("b").unwrap().shape(), [3, 5]);
        assert_eq!(theirs.tensor("a").unwrap().data().len(), 14);
    }

    #[test]
    fn headers_from_outside_are_refused() {
        for (text, problem) in [
            ("[]", "cannot be read"),
            (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, "length"),
            (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, "within"),
            (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[997,1001]}}"#, "within"),
            (r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,4]}}"#, "length"),
            (
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
                "share",
            ),
        ] {
            let error = parse(text.as_bytes(), 8 + text.len() as u64 + 1000).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        assert!(header_len([255; 8], u64::MAX).is_err());
    }
}
