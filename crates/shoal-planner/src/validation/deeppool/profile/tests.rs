//! Profiles made up here, in the format of the published ones.

use super::*;

/// A convolution, what follows it, and a dense layer, for two batch sizes.
const SMALL: &str = r#"
   conv2d{"in_channels":3,"kernel_size":3,"out_channels":4,"padding":1,"stride":1}[2][3,8,8]   0.030   30   1
   ReLU2d{"inplace":true,"kernel_size":1,"padding":0,"stride":1}[2][4,8,8]   0.090   10   80
   maxPool2d{"kernel_size":2,"padding":0,"stride":2}[2][4,8,8]   0.015   5   10
   flatten{"kernel_size":1}[2][4,4,4]   0.003   1   2
   linear{"bias":true,"in_features":64,"out_features":10}[2]64   0.020   20   0
   SUM(avg)  0.158  0.170
   conv2d{"in_channels":3,"kernel_size":3,"out_channels":4,"padding":1,"stride":1}[1][3,8,8]   0.020   20   1
   ReLU2d{"inplace":true,"kernel_size":1,"padding":0,"stride":1}[1][4,8,8]   0.060   10   50
   maxPool2d{"kernel_size":2,"padding":0,"stride":2}[1][4,8,8]   0.015   5   10
   flatten{"kernel_size":1}[1][4,4,4]   0.003   1   2
   linear{"bias":true,"in_features":64,"out_features":10}[1]64   0.020   20   0
"#;

#[test]
fn a_file_gives_times_by_batch_parameters_and_outputs() {
    let measured = read(SMALL, "small", Shape::Chain).unwrap();
    let parameters: Vec<u64> = measured.layers.iter().map(|layer| layer.parameters).collect();
    assert_eq!(parameters, [3 * 9 * 4 + 4, 0, 0, 0, 650]);
    let bytes: Vec<u64> = measured.layers.iter().map(|layer| layer.output_bytes).collect();
    assert_eq!(bytes, [1024, 1024, 256, 256, 40]);
    assert_eq!(measured.inputs, [vec![], vec![0], vec![1], vec![2], vec![3]]);
    assert_eq!(measured.backward[1].samples, [1, 2]);
    assert!((measured.backward[1].at(1) - 50e-6).abs() < 1e-12);
    assert!((measured.forward[0].at(2) - 30e-6).abs() < 1e-12);
}

#[test]
fn a_bottleneck_has_three_convolutions_and_one_beside_them_where_sizes_change() {
    let text = r#"ResnetBottleneck{"base_width":128,"dilation":1,"downsampleParams":[[64,256,1],256],"groups":1,"inplanes":64,"planes":64,"stride":1}[1][64,56,56] 1 1 1
        ResnetBottleneck{"base_width":128,"dilation":1,"groups":1,"inplanes":256,"planes":64}[1][256,56,56] 1 1 1
        ResnetBottleneck{"base_width":128,"dilation":1,"downsampleParams":[[256,512,2],512],"groups":1,"inplanes":256,"planes":128,"stride":2}[1][256,56,56] 1 1 1"#;
    let measured = read(text, "bottlenecks", Shape::Chain).unwrap();
    // torchvision's wide_resnet101_2.layer1.0 and .1.
    assert_eq!(measured.layers[0].parameters, 8192 + 256 + 147_456 + 256 + 32_768 + 512 + 16_384 + 512);
    assert_eq!(measured.layers[1].parameters, 32_768 + 256 + 147_456 + 256 + 32_768 + 512);
    assert_eq!(measured.layers[2].output_bytes, 4 * 512 * 28 * 28);
    assert!(measured.memory[2].kept_a_sample > measured.layers[2].output_bytes);
}

#[test]
fn what_is_wrong_is_named() {
    let error = |text: &str, shape: Shape| read(text, "file", shape).unwrap_err();
    let cut = SMALL.replace("[1]64", "[1");
    assert!(matches!(error(&cut, Shape::Chain), ProfileError::Line { line: 12, .. }));
    let other = SMALL.replace("[1][4,4,4]", "[1][4,4,5]");
    assert!(error(&other, Shape::Chain).to_string().contains("batch 2"));
    let unfit = SMALL.replace("][4,8,8]", "][4,9,9]");
    assert!(error(&unfit, Shape::Chain).to_string().contains("layer 1, ReLU2d, takes [4, 9, 9]"));
    let unknown = SMALL.replace("flatten", "attention");
    assert!(error(&unknown, Shape::Chain).to_string().contains("attention"));
    assert!(error(SMALL, Shape::InceptionV3).to_string().contains("does not have 5 layers"));
    assert!(error("", Shape::Chain).hint().is_some());
}

/// Lines as the published file of Inception-V3 would have them: of every layer its window, its stride and the channels
/// it makes (a pool keeps them), in the order of `BLOCKS`. All are padded so that sizes fit.
fn inception_text(channels_a_layer: usize) -> String {
    let mut text = String::new();
    let mut line = |size: usize, channels: usize, stride: usize| {
        text += &format!(
            "conv2d{{\"in_channels\":{channels},\"kernel_size\":[1,1],\"out_channels\":{channels_a_layer},\"padding\":0,\"stride\":{stride}}}[1][{channels},{size},{size}] 0.03 10 20\n"
        );
    };
    let (mut size, mut channels) = (8, 3);
    for _ in 0..STEM {
        line(size, channels, 1);
        channels = channels_a_layer;
    }
    for (times, branches) in BLOCKS {
        // Blocks that come once halve the image.
        let stride = if times == 1 { 2 } else { 1 };
        for _ in 0..times {
            let mut made = 0;
            for (length, forks) in branches {
                for place in 0..*length {
                    let into = if place == 0 { channels } else { channels_a_layer };
                    line(size, into, if place + 1 == *length { stride } else { 1 });
                }
                made += channels_a_layer * if *forks { 2 } else { 1 };
            }
            (size, channels) = (size / stride, made);
        }
    }
    text
}

#[test]
fn inception_has_its_forks_and_a_join_after_each_block() {
    let measured = read(&inception_text(4), "inception", Shape::InceptionV3).unwrap();
    assert_eq!(measured.layers.len(), 107 + 11);
    let joins: Vec<usize> =
        (0..measured.layers.len()).filter(|layer| measured.layers[*layer].name.ends_with("join")).collect();
    // The first block's eight layers stand before its join, and the next block reads it.
    assert_eq!(measured.inputs[joins[0]], [STEM, STEM + 2, STEM + 5, STEM + 7]);
    assert_eq!(measured.inputs[joins[0] + 1], [joins[0]]);
    // The last blocks fork within two of their branches.
    let last = *joins.last().unwrap();
    assert_eq!(measured.inputs[last].len(), 6);
    let [one, other] = [measured.inputs[last][1], measured.inputs[last][2]];
    assert_eq!(measured.inputs[one], measured.inputs[other]);
    assert!(
        measured.inputs.iter().enumerate().all(|(layer, inputs)| inputs.iter().all(|input| *input < layer))
    );
    assert_eq!(measured.forward[last].at(64), 0.0);
}
