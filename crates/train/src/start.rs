//! What parameters begin with: a seed, or a file of weights. Each rank makes or reads the elements that it keeps, and no
//! others.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::tensor::Metadata;
use shardwise_model::{Parameter, init};
use shardwise_zero::StartError;

/// Writes the beginning of some elements of a parameter.
pub type Start<'a> = dyn FnMut(&Parameter, Range<usize>, &mut [f32]) -> Result<(), StartError> + 'a;

/// Parameters as a seed begins them: the same whoever makes them.
pub fn from_seed(seed: u64) -> impl FnMut(&Parameter, Range<usize>, &mut [f32]) -> Result<(), StartError> {
    move |parameter, range, elements| {
        init::begin(seed, parameter, range, elements);
        Ok(())
    }
}

/// A safetensors file, of which only the header is read at first.
pub struct Weights {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    /// Where the tensors begin.
    data_offset: u64,
}

/// The longest header that is believed.
const HEADER_BYTES_MAX: u64 = 100 << 20;

impl Weights {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Self, StartError> {
        let file = File::open(path)?;
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(|_| "it is too short for a safetensors file")?;
        let length = u64::from_le_bytes(length);
        let file_bytes = file.metadata()?.len();
        if length > HEADER_BYTES_MAX.min(file_bytes.saturating_sub(8)) {
            return Err(format!("it is no safetensors file: its header would have {length} bytes").into());
        }
        let mut header = vec![0; length as usize];
        file.read_exact_at(&mut header, 8)?;
        // The crate's own reader wants the whole file in memory.
        let metadata: Metadata = serde_json::from_slice(&header)?;
        Ok(Weights { path: path.to_path_buf(), file, metadata, data_offset: length + 8 })
    }

    /// Reads elements of a parameter.
    pub fn read(&self, parameter: &Parameter, range: Range<usize>, elements: &mut [f32]) -> Result<(), StartError> {
        let at = |problem: String| StartError::from(format!("{}: {}: {problem}", self.path.display(), parameter.name));
        let found = self.metadata.info(&parameter.name).ok_or_else(|| at("there is no such tensor".to_string()))?;
        let shape: Vec<i64> = found.shape.iter().map(|&size| size as i64).collect();
        if shape != parameter.shape {
            return Err(at(format!("its shape is {shape:?}, and the model's is {:?}", parameter.shape)));
        }
        let (begin, end) = found.data_offsets;
        let size = match found.dtype {
            safetensors::Dtype::F32 => 4,
            safetensors::Dtype::BF16 | safetensors::Dtype::F16 => 2,
            other => return Err(at(format!("its elements are {other:?}, and only F32, BF16 and F16 can be read"))),
        };
        if end.saturating_sub(begin) != parameter.elements() * size || range.end > parameter.elements() {
            return Err(at("its length is not that of its shape".to_string()));
        }
        // In pieces that stay in the cache while they are converted.
        let mut bytes = vec![0; PIECE_ELEMENTS.min(range.len()) * size];
        let mut offset = self.data_offset + (begin + range.start * size) as u64;
        for piece in elements.chunks_mut(PIECE_ELEMENTS) {
            let bytes = &mut bytes[..piece.len() * size];
            self.file.read_exact_at(bytes, offset).map_err(|error| at(error.to_string()))?;
            offset += bytes.len() as u64;
            convert(found.dtype, bytes, piece);
        }
        Ok(())
    }
}

/// How many elements are read at once.
const PIECE_ELEMENTS: usize = 1 << 16;

/// F32, BF16 or F16 as they stand in a file.
fn convert(dtype: safetensors::Dtype, bytes: &[u8], elements: &mut [f32]) {
    let halves = || bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    match dtype {
        safetensors::Dtype::F32 => {
            for (element, four) in elements.iter_mut().zip(bytes.chunks_exact(4)) {
                *element = f32::from_le_bytes([four[0], four[1], four[2], four[3]]);
            }
        }
        safetensors::Dtype::BF16 => {
            halves().map(bf16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(elements);
        }
        _ => halves().map(f16::from_bits).collect::<Vec<_>>().convert_to_f32_slice(elements),
    }
}
