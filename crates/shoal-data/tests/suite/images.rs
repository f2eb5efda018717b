//! Images from files: what is read, and what is refused before training starts.

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use shoal_data::{Dataset, Error, IGNORED, ImageSpec, Inputs};

use crate::common::Folder;

/// A file of images of two channels, two by two.
fn file(folder: &Folder, name: &str, pixels: (Dtype, &[u8]), labels: &[i64]) {
    let labels: Vec<u8> = labels.iter().flat_map(|label| label.to_le_bytes()).collect();
    let images = pixels.1.len() / (8 * if pixels.0 == Dtype::U8 { 1 } else { 4 });
    let views = [
        ("images", TensorView::new(pixels.0, vec![images, 2, 2, 2], pixels.1).unwrap()),
        ("labels", TensorView::new(Dtype::I64, vec![labels.len() / 8], &labels).unwrap()),
    ];
    folder.write(name, safetensors::serialize(views, None).unwrap());
}

fn spec(folder: &Folder, name: &str) -> ImageSpec {
    ImageSpec {
        source: folder.join(name),
        shape: [2, 2, 2],
        classes: 3,
        cache: folder.cache(),
        mean: vec![0.5, 0.0],
        deviation: vec![0.5, 2.0],
        variation: None,
        class_names: None,
    }
}

fn open(spec: &ImageSpec) -> Result<Dataset, Error> {
    Dataset::open_images(spec, &mut |done, total| assert!(done <= total))
}

fn read(dataset: &Dataset, index: u64) -> (Vec<f32>, i32) {
    let (mut pixels, mut label) = (vec![7.0; 8], [7]);
    dataset.read(0, index, Inputs::Images(&mut pixels), &mut label).unwrap();
    (pixels, label[0])
}

#[test]
fn bytes_and_floats_are_normalised_channel_by_channel() {
    let folder = Folder::new();
    file(&folder, "a/1.safetensors", (Dtype::U8, &[0, 255, 0, 255, 0, 255, 51, 0]), &[2]);
    let floats: Vec<u8> = [0.0f32, 1.0, 0.5, 0.25, 4.0, 0.0, 0.0, 1.0].map(f32::to_le_bytes).concat();
    file(&folder, "a/2.safetensors", (Dtype::F32, &floats), &[i64::from(IGNORED)]);
    let dataset = open(&spec(&folder, "a")).unwrap();
    assert_eq!(dataset.len(), 2);
    assert_eq!(read(&dataset, 0), (vec![-1.0, 1.0, -1.0, 1.0, 0.0, 0.5, 0.1, 0.0], 2));
    assert_eq!(read(&dataset, 1), (vec![-1.0, 1.0, 0.0, -0.5, 2.0, 0.0, 0.0, 0.5], IGNORED));
    assert_eq!(open(&spec(&folder, "a")).unwrap().fingerprint(), dataset.fingerprint());
}

#[test]
fn what_does_not_fit_the_model_is_refused_by_name() {
    let folder = Folder::new();
    let refused = |spec: &ImageSpec, parts: &[&str]| {
        let error = open(spec).expect_err("it opens");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)) && error.hint().is_some(), "{text}");
    };
    file(&folder, "class.safetensors", (Dtype::U8, &[0; 16]), &[0, 3]);
    refused(&spec(&folder, "class.safetensors"), &["class.safetensors", "image 1", "label 3", "3 classes"]);
    file(&folder, "count.safetensors", (Dtype::U8, &[0; 16]), &[0]);
    refused(&spec(&folder, "count.safetensors"), &["labels", "2 images"]);
    file(&folder, "good.safetensors", (Dtype::U8, &[0; 8]), &[0]);
    let larger = ImageSpec { shape: [2, 4, 4], ..spec(&folder, "good.safetensors") };
    refused(&larger, &["[1, 2, 2, 2]", "[2, 4, 4]"]);
    file(&folder, "wide.safetensors", (Dtype::I32, &[0; 32]), &[0]);
    refused(&spec(&folder, "wide.safetensors"), &["I32"]);
    let nan: Vec<u8> = [f32::NAN; 8].map(f32::to_le_bytes).concat();
    file(&folder, "nan.safetensors", (Dtype::F32, &nan), &[0]);
    refused(&spec(&folder, "nan.safetensors"), &["image 0", "finite"]);
    let tokens = TensorView::new(Dtype::U8, vec![1, 3], &[1, 2, 3]).unwrap();
    folder.write("tokens.safetensors", safetensors::serialize([("tokens", tokens)], None).unwrap());
    refused(&spec(&folder, "tokens.safetensors"), &["\"images\"", "\"tokens\""]);
    folder.write("text.txt", "abc");
    refused(&spec(&folder, "text.txt"), &["text.txt", "images"]);
}
