//! Writing the headers of safetensors files, and parsing untrusted ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use shardwise_plan::Dtype;

use crate::region::elements;

/// The largest header that is accepted: the limit of the `safetensors` library.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// The dtype.
    pub dtype: Dtype,
    /// The shape.
    pub shape: Vec<u64>,
}

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The dtype, or the name of an unsupported one.
    pub dtype: Result<Dtype, String>,
    /// The shape.
    pub shape: Vec<u64>,
    /// The range of its bytes in the file.
    pub bytes: Range<u64>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Creates the header of a file with these tensors, stored back to back in this order.
pub fn header(entries: &[Entry]) -> Vec<u8> {
    let mut offset = 0;
    let info = |entry: &Entry| {
        let bytes =
            elements(&entry.shape).expect("tensors that are written are in memory") * entry.dtype.bytes() as u64;
        let start = offset;
        offset += bytes;
        let dtype = crate::dtype::name(entry.dtype).to_string();
        (entry.name.clone(), Info { dtype, shape: entry.shape.clone(), data_offsets: [start, offset] })
    };
    let infos: BTreeMap<String, Info> = entries.iter().map(info).collect();
    // Some readers require the format metadata.
    let mut all = BTreeMap::from([("__metadata__".to_string(), json!({ "format": "pt" }))]);
    all.extend(infos.into_iter().map(|(name, info)| (name, json!(info))));
    let mut text = serde_json::to_vec(&all).expect("a header can be written as JSON");
    // Pad so that the tensors are aligned for any dtype.
    text.resize((text.len() + 8).next_multiple_of(64) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Returns the length of a file's JSON header, which its first eight bytes contain. The header follows them; [`parse`] takes
/// it.
pub fn header_len(first: [u8; 8], file_bytes: u64) -> Result<u64, String> {
    let len = u64::from_le_bytes(first);
    match len <= HEADER_BYTES_MAX && len.checked_add(8).is_some_and(|end| end <= file_bytes) {
        true => Ok(len),
        false => Err(format!("it is not a safetensors file: its header would have {len} bytes")),
    }
}

/// Parses a header, and checks that all tensors lie within the file and none overlap.
pub fn parse(header: &[u8], file_bytes: u64) -> Result<BTreeMap<String, TensorInfo>, String> {
    let infos: BTreeMap<String, &RawValue> =
        serde_json::from_slice(header).map_err(|error| format!("its header cannot be read: {error}"))?;
    let data_start = 8 + header.len() as u64;
    let data_bytes = file_bytes.checked_sub(data_start).ok_or("it is shorter than its header")?;
    let mut found = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for (name, value) in infos {
        if name == "__metadata__" {
            continue;
        }
        let at = |problem: &str| format!("{name}: {problem}");
        let info: Info = serde_json::from_str(value.get()).map_err(|error| at(&error.to_string()))?;
        let [start, end] = info.data_offsets;
        if start > end || end > data_bytes {
            return Err(at("it is not within the file"));
        }
        if start < end && !taken.insert((start, end)) {
            return Err(at("it shares its bytes with another tensor"));
        }
        let dtype = crate::dtype::from_name(&info.dtype).ok_or(info.dtype);
        if let Ok(dtype) = &dtype {
            let bytes = elements(&info.shape).and_then(|len| len.checked_mul(dtype.bytes() as u64));
            if bytes != Some(end - start) {
                return Err(at("its length does not match its shape and dtype"));
            }
        }
        let bytes = data_start + start..data_start + end;
        found.insert(name, TensorInfo { dtype, shape: info.shape, bytes });
    }
    let mut free = 0;
    for (start, end) in taken {
        if start < free {
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
    fn headers_round_trip() {
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
        assert_eq!(found["b"], TensorInfo { dtype: Ok(Dtype::F32), shape: vec![3, 5], bytes: begin..begin + 60 });
        assert_eq!(found["a"].bytes, begin + 60..begin + 74);
        assert!(found["empty"].bytes.is_empty());
        assert!(parse(&header[8..], file_bytes - 1).is_err(), "a truncated file");
        // The `safetensors` library reads it.
        let file = [&header[..], &[1; 74]].concat();
        let theirs = ::safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(theirs.tensor("b").unwrap().shape(), [3, 5]);
        assert_eq!(theirs.tensor("a").unwrap().data().len(), 14);
    }

    #[test]
    fn invalid_headers_are_refused() {
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
